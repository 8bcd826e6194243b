"""What other tools call a setting is answered with its name here."""

from __future__ import annotations

from pathlib import Path

import pytest

from dearmpi.cli.main import main
from dearmpi.errors import ConfigError
from dearmpi.train.settings.settings import SETTINGS
from dearmpi.train.settings.sources import SYNONYMS, from_task, read_environment, read_file
from tests.codes import raises


def test_no_setting_is_called_another_and_all_answers_are_settings() -> None:
    flags = {about.flag.replace("-", "_") for about in SETTINGS.values()}
    assert not SYNONYMS.keys() & (SETTINGS.keys() | flags)
    assert set(SYNONYMS.values()) <= SETTINGS.keys() & flags


@pytest.mark.parametrize("command", [["run"], ["profile"], ["slurm", "--"]])
@pytest.mark.parametrize(
    ("given", "ours"),
    [
        (["--learning-rate", "0.1"], "lr"),
        (["--learning_rate=0.1"], "lr"),
        (["--num-epochs", "3"], "epochs"),
        (["--fp16"], "precision"),
    ],
)
def test_a_flag(
    capsys: pytest.CaptureFixture[str], command: list[str], given: list[str], ours: str
) -> None:
    assert main([*command, *given]) == 2
    told = capsys.readouterr().err
    name = given[0].partition("=")[0]
    assert f"No such option '{name}'; it is called --{ours} here." in told
    assert "Did you mean" not in told


def test_other_flags_are_answered_with_those_that_are_alike(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "--batchsize", "3"]) == 2
    assert "'--batch-size'" in capsys.readouterr().err


def test_a_variable() -> None:
    with raises(ConfigError, "unknown-setting", "it is", "DEAR_TRAIN_LR"):
        read_environment({"DEAR_TRAIN_LEARNING_RATE": "0.1"})


@pytest.mark.parametrize("key", ["num-train-epochs", "num_train_epochs"])
def test_a_key_of_a_file(tmp_path: Path, key: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"{key}: 3\n")
    with raises(ConfigError, "unknown-setting", key, "'", path, "it is"):
        read_file(path)


def test_what_a_task_recommends() -> None:
    with raises(ConfigError, "unknown-setting", "'wd'", "it is", "weight_decay"):
        from_task({"wd": 0.1}, task="mine")
