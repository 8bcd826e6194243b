"""dear-train profile and dear-train calibrate, in this process."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from dearmpi.bench.collective_times import describe_profile
from dearmpi.cli.flags import check_writable, write_file
from dearmpi.cli.main import main
from dearmpi.cli.measure import describe_calibration
from dearmpi.comm.backends.alone import AloneCollectives
from dearmpi.comm.world import World
from dearmpi.errors import ConfigError
from dearmpi.plan.data.workload import read_workload
from dearmpi.plan.model.profile import profile_workload, read_profile
from dearmpi.tune import calibrate as tuning
from dearmpi.tune.calibration import Calibration, SizeTimes

TASK = """
import torch
from torch import nn
from dearmpi.train.tasks.task import Task

def make(options):
    data = [torch.full((3,), i / 7) for i in range(8)]
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    loss = lambda model, batch: model(batch).square().mean()
    return Task("tiny", model, data, loss, unit="images")
"""


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").write_text(TASK)
    return f"{tmp_path}/tiny.py:make"


def test_a_profile_is_told_and_written(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--task", task, "--batch-size", "4", "--gradient-accumulation-steps", "2"]
    assert main(["profile", *arguments, "--num-batches", "2", "--out", "tiny.json"]) == 0
    text = capsys.readouterr().out
    assert "tiny: 2 layers, 4 tensors" in text and "batch size 2 per rank, 1 rank," in text
    assert "measured over 4 passes" in text and text.endswith("wrote tiny.json\n")
    profile = read_profile("tiny.json")
    assert [layer.name for layer in profile.workload.layers] == ["0", "2"]
    assert profile.backprop_s > 0
    assert (profile.workload.unit, profile.workload.batch_size) == ("image", 2)
    assert sorted(path.name for path in Path().iterdir() if path.name != "__pycache__") == [
        "tiny.json",
        "tiny.py",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["profile", "--num-batches", "0"], ["0 that count"]),
        (["profile", "--task", "no-such-task"], ["no-such-task"]),
        (["profile", "--plan", "bayes"], ["--plan bayes has no effect", "leave it out"]),
        (["profile", "--plan", "auto"], ["--plan auto has no effect"]),
        (["profile", "--log-interval", "3"], ["--log-interval has no effect on a profile"]),
        (["profile", "--config", ""], ["--config is empty; name a file, or leave it out"]),
        (["profile", "--max-time", "90m"], ["--max-time has no effect on a profile"]),
        (["profile", "--out", "/nowhere/at/all.json"], ["/nowhere/at"]),
        (["calibrate", "--out", "/nowhere/at/all.json"], ["/nowhere/at"]),
        (["calibrate", "--seconds", "0"], ["--seconds is 0"]),
        (["calibrate", "--seconds", "nan"], ["--seconds is nan"]),
        (["calibrate", "--seconds", "inf"], ["--seconds is inf", "finite"]),
        (["calibrate"], ["one rank", "mpirun"]),
        (["calibrate", "--reduce-scatter", "tree"], ["tree", "ring"]),
        (["calibrate", "--topology", "racks"], ["'racks'", "2x4"]),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    text = capsys.readouterr().err
    assert all(word in text for word in words), text


def test_the_help_of_a_profile_names_no_flag_that_it_refuses(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["profile", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--batch-size N" in text
    assert all(flag not in text for flag in ("--log-interval", "--resume", "--plan "))


def test_a_device_may_be_written_to_and_a_folder_may_not(tmp_path: Path) -> None:
    check_writable(Path("/dev/null"))
    check_writable(tmp_path / "new.json")
    with pytest.raises(ConfigError, match="is no folder that can be written to"):
        check_writable(tmp_path / "nowhere" / "new.json")


def test_a_full_disk_is_told_of_without_a_traceback() -> None:
    with pytest.raises(ConfigError, match="cannot write /dev/full: No space left on device; make"):
        write_file(Path("/dev/full"), "{}")


def test_a_config_file_of_a_run_serves_a_profile_too(
    task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.yaml").write_text(f"task: {task}\nplan: auto\nlog_interval: 3\nbatch_size: 4\n")
    assert main(["profile", "--config", "run.yaml", "--num-batches", "2"]) == 0
    assert "tiny: 2 layers" in capsys.readouterr().out


def test_what_a_run_keeps_is_left_alone_by_a_profile_of_its_file(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the run that has the name nor its checkpoint matters, and nothing is recorded."""
    file, arguments = Path("run.yaml"), ["--config", "run.yaml", "--num-batches", "2"]
    settings = f"task: {task}\nname: a\nmax_steps: 3\nbatch_size: 4\n"
    file.write_text(settings)
    assert main(["run", "--config", "run.yaml"]) == 0
    before = sorted(Path("runs").rglob("*"))
    assert main(["profile", *arguments]) == 0
    file.write_text(settings + "resume: auto\ntrace: '500:504'\n")
    monkeypatch.setenv("DEAR_TRAIN_EVAL_INTERVAL", "2")  # the task has no held-out data
    assert main(["profile", *arguments, "--batch-size", "2"]) == 0
    assert sorted(Path("runs").rglob("*")) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_profile_leaves_to_a_signal_what_it_does(task: str, number: signal.Signals) -> None:
    """It saves nothing, so there is nothing to wait for: by default the signal ends it."""
    heard: list[int] = []
    before = signal.signal(number, lambda number, _: heard.append(number))
    try:
        source = Path("tiny.py").read_text()
        raising = f"import signal; signal.raise_signal(signal.{number.name})"
        Path("loud.py").write_text(source.replace("    model =", f"    {raising}\n    model ="))
        assert main(["profile", "--task", "loud.py:make", "--num-batches", "1"]) == 0
    finally:
        signal.signal(number, before or signal.SIG_DFL)
    assert heard == [number]


def test_a_profile_is_replayed(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--task", task, "--batch-size", "4", "--out", "tiny.json"]) == 0
    arguments = ["--workload", "tiny.json", "--methods", "dear", "--num-iters", "1"]
    assert main(["bench", *arguments, "--num-batches-per-iter", "2"]) == 0
    assert "tiny (replay), batch size 4 per rank" in capsys.readouterr().out
    assert main(["bench", *arguments, "--ratio", "1"]) == 2
    assert "tiny.json; leave out the ratio" in capsys.readouterr().err


def test_a_table_of_many_layers_shows_the_slowest() -> None:
    profile = profile_workload(read_workload("equal:1:50"), feed_forward_s=1.0, backprop_s=2.0)
    lines = describe_profile(profile)
    assert lines[-1] == "and 10 faster ones, 600.000 ms in all"
    assert len(lines) == 4 + 40 + 1
    first = next(line for line in lines if line.startswith("layer0 "))
    assert first.split()[1:] == ["1", "0.020", "20.000", "40.000", "2000.000"]


def test_a_table_of_costs() -> None:
    samples = tuple(SizeTimes(n, 1e-3 + 6e-9 * n, 12e-9 * n) for n in (2**16, 2**19, 2**22))
    lines = describe_calibration(
        Calibration(("n0", "n1", "n1", "n2"), "MPICH 5", "exchange", samples, samples)
    )
    assert lines[0] == "4 ranks on n0, n1, n2; MPICH 5"
    row = next(line for line in lines if line.startswith("reduce-scatter exchange  "))
    assert row.split()[2:] == ["64", "1.393", "0.393", "1.393"]
    assert lines[-1] == (
        "all-gather: 1.000 ms + 6.000 ns per byte (1000 Mbit/s sent), +-0%; "
        "on the wire 100% of the latter"
    )


def test_times_that_no_line_fits_are_told_not_to_be_planned_with() -> None:
    times = (5e-3, 1e-3, 30e-3, 4e-3)  # another program has used the cores meanwhile
    samples = tuple(SizeTimes(2 ** (16 + i), time, 1.5 * time) for i, time in enumerate(times))
    lines = describe_calibration(Calibration(("a", "b"), "MPICH 5", "ring", samples, samples))
    assert lines[-1].startswith("a plan cannot be made") and lines[-1].endswith("measure again")


def test_a_calibration_that_no_plan_can_be_made_of_ends_with_the_code_of_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One truth for both: ``plan`` refuses the file that ``calibrate`` has told of, and written."""
    times = (5e-3, 1e-3, 30e-3, 4e-3)
    samples = tuple(SizeTimes(2 ** (16 + i), time, 1.5 * time) for i, time in enumerate(times))
    profile = profile_workload(read_workload("equal:24:6"), feed_forward_s=0.1, backprop_s=0.2)
    (tmp_path / "profile.json").write_text(profile.to_json())
    link = tmp_path / "link.json"

    def measure(noisy: bool) -> int:
        measured = samples if noisy else samples[1::2]  # a line goes through two
        result = Calibration(("a", "b"), "MPICH 5", "ring", measured, measured)
        monkeypatch.setattr(tuning, "calibrate", lambda *_, **__: result)
        world = World(AloneCollectives(), progress="poll")
        world.size = 2  # type: ignore[misc] # one rank alone is refused
        monkeypatch.setattr("dearmpi.comm.lifecycle.connect", lambda *_, **__: world)
        return main(["calibrate", "--out", str(link)])

    given = ["--profile", str(tmp_path / "profile.json"), "--samples-per-rank", "32"]
    for noisy, code in ((True, 1), (False, 0)):
        assert measure(noisy) == code
        told = capsys.readouterr()
        assert ("a plan cannot be made of times" in told.out) == noisy
        assert main(["plan", *given, "--calibration", str(link)]) == code
        told = capsys.readouterr()
        assert (f"{link}: a plan cannot be made of times" in told.err) == noisy
        assert main(["simulate", "--network", str(link), *given[:2], "--method", "dear"]) == 0
        assert ("a plan cannot be made of times" in capsys.readouterr().out) == noisy


def test_a_link_whose_bytes_took_no_time_is_told() -> None:
    samples = (SizeTimes(2**16, 2e-3, 2e-3), SizeTimes(2**19, 1.5e-3, 1.5e-3))
    lines = describe_calibration(Calibration(("a", "b"), "MPICH 5", "ring", samples, samples))
    assert "no time per byte was seen: calibrate for longer with --seconds" in lines[-1]
