"""The command line before anything is trained."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import torch
from click.shell_completion import ShellComplete

import dearmpi
from dearmpi.cli.commands import group
from dearmpi.cli.flags import setting_options
from dearmpi.cli.main import main
from dearmpi.cli.run import read_sources
from dearmpi.errors import ConfigError
from dearmpi.train import checkpoint
from dearmpi.train.checkpoint import Snapshot
from dearmpi.train.settings.settings import SETTINGS
from dearmpi.train.settings.sources import merge
from tests.unit.cli.bare import run_bare

TOO_LONG = "a" * 300  # a name that may not be looked at, not even by root


def test_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help-all"]) == 0
    text = capsys.readouterr().out
    assert all(f"--{about.flag}" in text for about in SETTINGS.values())
    for section in {about.section for about in SETTINGS.values()}:
        assert f"\n{section}:\n" in text


def test_the_short_help_lists_the_usual_flags_and_names_the_long_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "--help"]) == 0
    text = capsys.readouterr().out
    shown = [name for name, about in SETTINGS.items() if f"  --{about.flag} " in text]
    assert shown == [name for name, about in SETTINGS.items() if about.usual]
    assert len(shown) == 10 and "--help-all" in text and "--config FILE" in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        *([name, "--help"] for name in ("run", "checkpoint", "bench", "simulate", "doctor")),
    ],
)
def test_help_needs_neither_torch_nor_mpi(arguments: list[str]) -> None:
    is_light = "assert not {'numpy', 'yaml', 'safetensors'} & set(sys.modules), 'slow to start'"
    assert run_bare(*arguments, then=is_light).startswith("Usage: dear-train")


def commands_below(command: click.Command, *names: str) -> Iterator[list[str]]:
    """Every command's name, behind those of the groups it is in; the first is ``command``."""
    yield [*names]
    for name, below in command.commands.items() if isinstance(command, click.Group) else ():
        yield from commands_below(below, *names, name)


@pytest.mark.parametrize("names", list(commands_below(group)), ids=" ".join)
def test_help_fits_a_terminal_of_80_columns(
    names: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    wanted = "--help-all" if names in (["run"], ["profile"]) else "--help"
    assert main([*names, wanted]) == 0
    told = capsys.readouterr().out
    assert told.startswith("Usage: dear-train")
    assert not [line for line in told.splitlines() if len(line) > 80]


@pytest.mark.parametrize("commands", [[], ["checkpoint"], ["trace"]])
def test_every_command_is_listed_in_a_whole_sentence(
    commands: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main([*commands, "--help"])
    told = capsys.readouterr().out
    listed = told.partition("Commands:\n")[2]
    assert listed and "..." not in listed and listed.count(".\n") == listed.count("\n")


def test_an_error_of_a_command_has_its_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path / "absent")]) == 2
    assert "[file-missing]" in capsys.readouterr().err


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dear-train {dearmpi.__version__}\n"


def test_an_unknown_flag_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--epoch", "3"]) == 2
    told = capsys.readouterr().err
    assert "--epoch" in told and "--epochs" in told


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trane"]) == 2
    assert "trane" in capsys.readouterr().err


def test_flags_become_settings_and_what_is_not_given_stays_open() -> None:
    names = {option.name for option in setting_options()}
    given: dict[str, object] = {name: None for name in names if name in SETTINGS}
    given |= {"lr": "1e-3", "task_options": ("width=8", "depth=2"), "optimizer_options": ()}
    sources = read_sources(given, {}, None)
    assert merge(sources) == {"lr": 1e-3, "task_options": {"width": "8", "depth": "2"}}


def test_the_file_is_read_below_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("seed: 1\nwindow: 1\n")
    sources = read_sources({"keep": "1"}, {"DEAR_TRAIN_SEED": "2"}, str(path))
    assert merge(sources) == {"keep": 1, "seed": 2, "window": 1}


def test_a_wrong_value_is_refused_by_its_flag() -> None:
    with pytest.raises(ConfigError, match="--window is 'two'; it must be a whole number"):
        read_sources({"window": "two"}, {}, None)


def test_a_checkpoint_is_shown_and_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint.save(tmp_path, Snapshot(7, {"w": torch.ones(2)}, {}, [], {}))
    assert main(["checkpoint", "show", str(tmp_path)]) == 0
    assert "step 7" in capsys.readouterr().out
    out = tmp_path / "model.pt"
    for more, code in (([], 0), ([], 2), (["--overwrite"], 0)):
        assert main(["checkpoint", "export", str(tmp_path), str(out), *more]) == code
    assert f"wrote {out}" in capsys.readouterr().out


def test_a_folder_of_runs_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "runs"
    for name, steps in (("one", (7, 40)), ("broken", (3,)), ("two", (5,))):
        for step in steps:
            checkpoint.save(runs / name, Snapshot(step, {"w": torch.ones(2)}, {}, [], {}))
    (runs / "begun" / "checkpoints").mkdir(parents=True)
    (runs / "notes").mkdir()
    manifest = next((runs / "broken" / "checkpoints").rglob("manifest.json"))
    manifest.write_text("{")
    assert main(["checkpoint", "show", str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "step", "written", "checkpoints", "remarks"]
    cells = {line.split()[0]: line.split() for line in lines[1:]}
    assert list(cells) == ["begun", "broken", "one", "two"]
    assert cells["one"][1] == "40" and cells["one"][3] == "2" and cells["two"][1] == "5"
    written = datetime.datetime.fromisoformat(cells["one"][2])
    assert abs(written - datetime.datetime.now(datetime.UTC)) < datetime.timedelta(hours=1)
    assert cells["begun"][1:] == ["-", "-", "0", "no", "checkpoint", "yet"]
    assert str(manifest) in " ".join(cells["broken"])


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["plan", "--gather", "params"], "parameters"),
        (["calibrate", "--compress", "int6"], "int8"),
        (["slurm", "--launcher", "mpi-run"], "mpirun"),
        (["federate", "--split", "labels"], "label"),
    ],
)
def test_every_command_suggests_the_nearest_choice(
    capsys: pytest.CaptureFixture[str], arguments: list[str], meant: str
) -> None:
    assert main(arguments) == 2
    assert f"did you mean '{meant}'?" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "begun", "kind", "values"),
    [
        (["run"], "--lr", "plain", ["--lr", "--lr-schedule", "--lr-milestones", "--lr-gamma"]),
        (["run", "--schedule"], "", "plain", ["serial", "wfbp", "dear"]),
        (["run", "--compress"], "int", "plain", ["int8", "int4"]),
        (["run", "--data"], "cor", "file", ["cor"]),
        (["run", "--config"], "my", "file", ["my"]),
        (["run", "--resume"], "ru", "file", ["ru"]),
        (["plan", "--gather"], "p", "plain", ["parameters"]),
    ],
)
def test_a_shell_completes_flags_and_their_values(
    arguments: list[str], begun: str, kind: str, values: list[str]
) -> None:
    found = ShellComplete(group, {}, "dear-train", "_DEAR_TRAIN_COMPLETE").get_completions(
        arguments, begun
    )
    assert [(one.type, one.value) for one in found] == [(kind, value) for value in values]


def test_a_folder_of_runs_is_none_to_export_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        checkpoint.save(tmp_path / name, Snapshot(7, {"w": torch.ones(2)}, {}, [], {}))
    assert main(["checkpoint", "export", str(tmp_path), str(tmp_path / "model.pt")]) == 6
    assert "it is a folder of runs; give one of one, two" in capsys.readouterr().err
    inside = str(tmp_path / "one" / "checkpoints")
    assert main(["checkpoint", "show", inside]) == 0
    assert "step 7" in capsys.readouterr().out


def test_a_checkpoint_that_is_none_is_told_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "show", str(tmp_path / "nothing")]) == 6
    told = capsys.readouterr().err
    assert told.startswith("dear-train: error: ") and "is no folder" in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["checkpoint", "show", TOO_LONG], 6),
        (["checkpoint", "export", TOO_LONG, "model.pt"], 6),
        (["checkpoint", "export", ".", f"{TOO_LONG}.pt"], 6),
        (["report", TOO_LONG], 2),
        (["trace", "merge", TOO_LONG], 2),
    ],
)
def test_a_path_that_may_not_be_looked_at_is_told_without_a_traceback(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint.save(tmp_path, Snapshot(7, {"w": torch.ones(2)}, {}, [], {}))
    assert main(arguments) == code
    told = capsys.readouterr().err
    assert told.startswith("dear-train: error: ") and TOO_LONG in told
