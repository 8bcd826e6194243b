"""dear-train slurm: the text of the script, what it runs, and how it is handed to sbatch."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dearmpi.cli.main import main
from dearmpi.cli.slurm import BatchScript, Launcher
from dearmpi.errors import ConfigError

NASTY = ["--task", "my task.py:make", "--data", "'; touch spoiled; $(touch spoiled) `x` \"*\n#"]


def render(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["slurm", *arguments]) == 0
    return capsys.readouterr().out


def options_of(script: str) -> list[str]:
    return [line for line in script.splitlines() if line.startswith("#SBATCH ")]


def test_without_numbers_it_is_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    file = Path(__file__).parents[3] / "slurm" / "train.sbatch"
    kept = [line for line in render(capsys).splitlines() if not line.startswith("DEARMPI_VENV=")]
    assert kept == file.read_text().splitlines()


@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_given_numbers_take_the_place_of_the_files(
    capsys: pytest.CaptureFixture[str], launcher: str
) -> None:
    script = render(
        capsys,
        *("--nodes", "2", "--ntasks-per-node", "4", "--time", "1-12:00:00", "--launcher", launcher),
        *("--partition", "short", "--sbatch-option", "exclusive", "--sbatch-option", "mem=16G"),
    )
    assert sorted(options_of(script)) == sorted(
        [
            "#SBATCH --job-name=dear-train",
            "#SBATCH --cpus-per-task=1",
            "#SBATCH --signal=B:USR1@120",
            "#SBATCH --requeue",
            "#SBATCH --no-kill",
            "#SBATCH --open-mode=append",
            "#SBATCH --nodes=2",
            "#SBATCH --ntasks-per-node=4",
            "#SBATCH --time=1-12:00:00",
            "#SBATCH --partition=short",
            "#SBATCH --exclusive",
            "#SBATCH --mem=16G",
        ]
    )
    assert f"dear-train requeue dear-train restart {launcher} " in script
    # sbatch reads no option after the first command.
    assert script.rindex("#SBATCH ") < script.index("set -eu")


@pytest.mark.parametrize(
    "limit",
    ["3", "2:30", "00:02:30", "1-0", "1-0:30", "1-12:00:00", "0", "0:00", "-1", "UNLIMITED"],
)
def test_time_limits_are_those_of_sbatch(capsys: pytest.CaptureFixture[str], limit: str) -> None:
    assert f"#SBATCH --time={limit}" in options_of(render(capsys, "--time", limit))


def test_a_short_job_is_warned_later(capsys: pytest.CaptureFixture[str]) -> None:
    later = ("--sbatch-option", "signal=B:USR1@20")
    assert "#SBATCH --time=1" in options_of(render(capsys, "--time", "1", *later))


def test_what_excludes_an_option_of_the_file_takes_its_place(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = options_of(render(capsys, "--sbatch-option", "ntasks-per-gpu=1"))
    assert "#SBATCH --ntasks-per-gpu=1" in options
    assert not any("ntasks-per-node" in option for option in options)


def test_all_of_the_files_numbers_may_be_given() -> None:
    given = {
        "job-name": "a",
        "ntasks-per-node": "4",
        "cpus-per-task": "8",
        "time": "2:00:00",
        "signal": "B:USR1@300",
        "requeue": None,
        "no-kill": None,
        "open-mode": "append",
    }
    script = BatchScript(launcher="mpirun", options=given, arguments=(), environment=".venv")
    text = script.render()
    assert len(options_of(text)) == len(given)
    assert text.rindex("#SBATCH ") < text.index("set -eu")


@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_arguments_reach_the_run_word_by_word_and_nothing_else_is_run(
    tmp_path: Path, launcher: Launcher
) -> None:
    environment = tmp_path / "it's {my} $env"
    program = environment / "bin" / "dear-train"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nprintf "%s\\0" "$@" > {tmp_path}/told\n')
    program.chmod(0o755)
    script = BatchScript(
        launcher=launcher, options={}, arguments=NASTY, environment=str(environment)
    )
    subprocess.run(
        ["bash", "-s", "--", "--lr", "1"],
        input=script.render(),
        text=True,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"},
        check=True,
        timeout=180,
    )
    words = (tmp_path / "told").read_text().split("\0")[:-1]
    assert words[-len(NASTY) - 2 :] == [*NASTY, "--lr", "1"]
    assert not (tmp_path / "spoiled").exists()


@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_a_command_of_ones_own_takes_the_place_of_the_run(
    launcher: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["python", "script.py", "--lr", "fast", *NASTY]
    script = render(capsys, "--launcher", launcher, "--nodes", "2", "--", *words)
    # Run where the launcher prints its words instead.
    fake = tmp_path / "bin"
    fake.mkdir()
    for name in ("dear-train", "python"):
        (fake / name).write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
        (fake / name).chmod(0o755)
    ended = subprocess.run(
        ["bash", "-c", script],
        env={"PATH": "/usr/bin:/bin", "DEARMPI_VENV": str(tmp_path), "SLURM_NTASKS": "4"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    given = ended.stdout.split("\0")[:-1]
    assert given[:4] == ["requeue", "dear-train", "restart", launcher]
    assert given[-len(words) :] == words
    assert ("--run-folder" in given, "--resume" in given) == (False, False)


def test_a_script_that_the_job_would_miss_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["slurm", "--submit", "--", "python", "absent.py"]) == 2
    assert "absent.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--partition", "a b"], "partition is 'a b'"),
        (["--job-name", "a\n#SBATCH --uid=0"], "cannot stand in a batch script"),
        (["--time", "1:00;x"], "time is '1:00;x'"),
        (["--time", "foo"], "time is 'foo', which sbatch does not take"),
        (["--time", "1-2-3"], "write minutes, or [D-]HH:MM:SS"),
        (["--time", "2"], "time is 2, 120 s, but the job is told to save and stop 120 s before"),
        (["--time", "00:01:30"], "signal=B:USR1@20"),
        (["--partition", ""], "partition is ''"),
        (["--sbatch-option", "--mem=1G"], "without dashes"),
        (["--sbatch-option", "mem="], "mem is ''"),
        (["--sbatch-option", "cpus-per-gpu=8"], "give --cpus-per-task, the cores of a rank"),
        (["--sbatch-option", "qos=a", "--sbatch-option", "qos=b"], "qos is given twice"),
        (["--nodes", "2", "--sbatch-option", "nodes=3"], "nodes is given twice"),
        (["--nodes", "0"], "--nodes"),
        (["--", "--lrr", "3"], "--lrr"),
        (["--", "--lrr", "3"], "Try 'dear-train run --help'"),
        (["--", "--lr", "fast"], "--lr is 'fast'"),
        (["--", "--config", ""], "--config is empty"),
        (["--", "--data", ""], "--data is empty"),
        (
            ["--lr", "0.1"],
            "--lr is an option of dear-train run; write all of those after --",
        ),
        (["--node", "2"], "Did you mean '--nodes'?"),
    ],
)
def test_what_would_fail_later_is_refused_now(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["slurm", *arguments]) == 2
    told = capsys.readouterr()
    assert message in told.err and told.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--deterministic --plan auto", "deterministic needs a fixed plan"),
        ("--stall-warning-s 700", "700"),
        ("--reduce-scatter native --comm-dtype bf16", "no sums in half precision"),
        ("--plan bayes --bucket-cap-mb 3", "plan bayes searches for it"),
        ("--window 4 --plan auto", "window is 4, but the plan decides on it"),
    ],
)
def test_settings_that_exclude_each_other_are_refused_before_a_job_waits_for_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    words = arguments.split()
    assert main(["slurm", "--", *words]) == 2
    told = capsys.readouterr()
    assert message in told.err and told.out == ""
    assert render(capsys, "--", *words, "--config", str(tmp_path / "elsewhere.yaml"))


@pytest.mark.parametrize(
    ("task", "told"),
    [
        ("digitz", "there is no task 'digitz'; did you mean 'digits'?"),
        ("synthetic:bert-bas", "no task synthetic:bert-bas; did you mean 'bert-base'?"),
        ("mine.py", "task 'mine.py' names no function; write mine.py:FUNCTION"),
    ],
)
def test_a_task_that_there_is_not_is_refused_as_run_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, task: str, told: str
) -> None:
    for arguments in (["slurm", "--"], ["slurm", "--submit", "--"], ["run"]):
        assert main([*arguments, "--task", task]) == 2
        printed = capsys.readouterr()
        assert told in printed.err and printed.out == ""
    assert main(["slurm", "--", "--task", task, "--config", "elsewhere.yaml"]) == 2
    monkeypatch.setenv("DEAR_TRAIN_TASK", task)
    assert main(["slurm"]) == 2
    assert render(capsys, "--", "--task", "digits")  # which overrules it


@pytest.mark.parametrize(
    "task", ["bytes-lm", "synthetic:resnet50", "synthetic:timm:any", "package.of_the_node:make"]
)
def test_a_task_that_may_be_there_is_taken(capsys: pytest.CaptureFixture[str], task: str) -> None:
    assert f"--task {task}" in render(capsys, "--", "--task", task)


@pytest.mark.parametrize(
    ("flag", "value", "file"),
    [
        ("--config", "sub/run.yaml", "sub/run.yaml"),
        ("--task", "my_tsk.py:build", "my_tsk.py"),
        ("--task", "sub/my_tsk.py:build", "sub/my_tsk.py"),
        ("--optimizer", "sub/mine.py:Own", "sub/mine.py"),
    ],
)
def test_a_file_that_the_run_would_miss_is_told_before_a_job_waits_for_it(
    tmp_path: Path,
    sbatch: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flag: str,
    value: str,
    file: str,
) -> None:
    sbatch.write_text("#!/bin/sh\necho Submitted batch job 7\n")
    sbatch.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    words = ["--", flag, value]
    expected = f"{flag} is {value}, and there is no file {tmp_path / file}"
    assert main(["slurm", *words]) == 0
    told = capsys.readouterr()
    assert f"warning: {expected}" in told.err and value in told.out

    assert main(["slurm", "--submit", *words]) == 2
    told = capsys.readouterr()
    assert f"error: {expected}" in told.err and "leave out --submit" in told.err and not told.out

    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    for submit in ([], ["--submit"]):
        assert main(["slurm", *submit, *words]) == 0
        assert capsys.readouterr().err == ""


def test_a_plan_a_checkpoint_and_settings_are_looked_at_where_they_are_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for flag, value, what in (("--plan", "p.json", "file"), ("--resume", "runs/a", "checkpoint")):
        assert main(["slurm", "--", flag, value]) == 0
        told = f"{flag} is {value}, and there is no {what} {tmp_path / value}"
        assert told in capsys.readouterr().err
        assert main(["slurm", "--submit", "--", flag, value]) == 2
        assert told in capsys.readouterr().err
    for word in ("auto", "none", "bayes"):
        assert main(["slurm", "--", "--plan", word]) == 0
    assert main(["slurm", "--", "--resume", "auto"]) == 0
    (tmp_path / "runs" / "a").mkdir(parents=True)
    assert main(["slurm", "--", "--resume", "runs/a"]) == 0
    assert capsys.readouterr().err == ""
    (tmp_path / "p.json").write_text('{"hosts": []}')
    assert main(["slurm", "--", "--plan", "p.json"]) == 2
    assert "give a plan, as dear-train plan writes it" in capsys.readouterr().err
    (tmp_path / "s.yaml").write_text("tsk: digits")
    assert main(["slurm", "--", "--config", "s.yaml"]) == 2
    assert "tsk" in capsys.readouterr().err
    (tmp_path / "s.yaml").write_text("task: digitz")
    assert main(["slurm", "--", "--config", "s.yaml"]) == 2
    assert "did you mean 'digits'" in capsys.readouterr().err


def test_files_are_looked_for_where_the_job_will_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "task.py").touch()
    monkeypatch.chdir(tmp_path)
    assert main(["slurm", "--sbatch-option", "chdir=/no/where", "--", "--task", "task.py:f"]) == 0
    assert "there is no file /no/where/task.py" in capsys.readouterr().err
    monkeypatch.setenv("DEAR_TRAIN_TASK", "gone.py:f")  # which a flag overrules
    assert main(["slurm", "--", "--task", "task.py:f"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["slurm"]) == 0
    assert "DEAR_TRAIN_TASK is gone.py:f, and there is no file" in capsys.readouterr().err


def test_a_module_or_a_task_that_comes_along_is_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    for task in ("package.module:function", "digits", "synthetic:resnet50"):
        assert main(["slurm", "--", "--task", task]) == 0
        assert capsys.readouterr().err == ""


def test_what_a_task_may_justify_or_a_variable_does_is_not_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert render(capsys, "--", "--lr-milestones", "0.3,0.6")
    monkeypatch.setenv("DEAR_TRAIN_STALL_ABORT_S", "900")
    assert render(capsys, "--", "--stall-warning-s", "700")


def test_a_script_is_refused_where_it_is_made() -> None:
    with pytest.raises(ConfigError, match="comment is 'a\\\\nb'"):
        BatchScript(launcher="srun", options={"comment": "a\nb"}, arguments=[], environment="")


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only program on the PATH."""
    path = tmp_path / "bin" / "sbatch"
    path.parent.mkdir()
    monkeypatch.setenv("PATH", str(path.parent))
    return path


def test_submit_hands_the_script_to_sbatch(
    sbatch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sbatch.write_text(f"#!/bin/sh\n/bin/cat > {sbatch}.in\necho Submitted batch job 7\n")
    sbatch.chmod(0o755)
    script = render(capsys, "--nodes", "3", "--", "--lr", "0.1")
    assert render(capsys, "--nodes", "3", "--submit", "--", "--lr", "0.1") == (
        "Submitted batch job 7\n"
    )
    assert Path(f"{sbatch}.in").read_text() == script


def test_what_sbatch_says_against_it_is_told(
    sbatch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sbatch.write_text("#!/bin/sh\necho invalid partition specified: x >&2\nexit 1\n")
    sbatch.chmod(0o755)
    assert main(["slurm", "--partition", "x", "--submit"]) == 3
    assert "sbatch refused the job: invalid partition" in capsys.readouterr().err


@pytest.mark.usefixtures("sbatch")
def test_without_sbatch_it_says_where_to_submit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slurm", "--submit"]) == 3
    told = capsys.readouterr().err
    assert "cannot start sbatch" in told and "leave out --submit" in told
