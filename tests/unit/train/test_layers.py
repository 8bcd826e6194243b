"""Where settings come from, and which source wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from dearmpi.errors import ConfigError
from dearmpi.train.layers import (
    Layer,
    from_checkpoint,
    from_task,
    make_layer,
    merge,
    read_environment,
    read_file,
    resolve,
)

TASK = from_task(
    {
        "optimizer": "AdamW",
        "optimizer_options": {"betas": (0.9, 0.99)},
        "lr": 4e-3,
        "max_steps": 2000,
        "warmup_steps": 50,
        "weight_decay": 0.1,
        "batch_size": 16,
    },
    task="t",
)


def flags(**values: object) -> Layer:
    return make_layer("flag", values)


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def test_flag_beats_environment_beats_file_beats_task_beats_default(tmp_path: Path) -> None:
    file = read_file(write(tmp_path, "seed: 3\nbatch_size: 3\nlr: 1e-3\nwindow: 3\n"))
    environment = read_environment({"DEAR_TRAIN_SEED": "2", "DEAR_TRAIN_BATCH_SIZE": "2"})
    settings = resolve([flags(seed="1"), environment, file, TASK])
    assert (settings.seed, settings.batch_size, settings.lr) == (1, 2, 1e-3)
    assert (settings.window, settings.max_steps, settings.keep) == (3, 2000, 3)


def test_a_length_given_above_replaces_the_other_kind_of_length_below() -> None:
    settings = resolve([flags(epochs="3", warmup_epochs="1"), TASK])
    assert (settings.epochs, settings.max_steps) == (3, None)
    assert (settings.warmup_epochs, settings.warmup_steps) == (1.0, None)


def test_two_lengths_from_one_source_are_refused() -> None:
    with pytest.raises(ConfigError, match="--epochs 3 and --max-steps 9 exclude each other"):
        flags(epochs="3", max_steps="9")


def test_another_optimizer_takes_nothing_of_what_suits_the_tasks_own() -> None:
    settings = resolve([flags(optimizer="SGD"), TASK])
    assert (settings.lr, settings.weight_decay, settings.optimizer_options) == (None, None, {})
    assert settings.batch_size == 16


def test_the_same_optimizer_spelled_otherwise_keeps_the_tasks_options() -> None:
    assert resolve([flags(optimizer="adamw"), TASK]).lr == 4e-3


def test_options_of_several_sources_are_merged_by_name() -> None:
    merged = merge([flags(optimizer_options=["eps=1e-6", "betas=0.5,0.6"]), TASK])
    assert merged["optimizer_options"] == {"eps": 1e-6, "betas": (0.5, 0.6)}
    merged = merge([flags(optimizer_options=["eps=1e-6"]), TASK])
    assert merged["optimizer_options"] == {"eps": 1e-6, "betas": (0.9, 0.99)}


def test_keys_of_the_file_may_be_written_as_flags_are(tmp_path: Path) -> None:
    layer = read_file(write(tmp_path, "batch-size: 4\ntask-option: {width: 8}\n"))
    assert layer.values == {"batch_size": 4, "task_options": {"width": "8"}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batchsize: 4", "unknown setting 'batchsize' in {path}; did you mean 'batch_size'?"),
        ("batch-size: 4\nbatch_size: 5", "batch_size is given twice in {path}"),
        ("- epochs", "{path} holds a list; it must hold settings"),
        ("epochs: [", "{path} is no YAML"),
        ("epochs: many", "epochs in {path} is 'many'; it must be a whole number"),
    ],
)
def test_mistakes_in_the_file_are_told_with_its_path(
    tmp_path: Path, text: str, message: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_file(path)
    assert message.format(path=path) in str(caught.value)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the config file .*nothing.yaml"):
        read_file(tmp_path / "nothing.yaml")


def test_an_empty_file_and_empty_variables_give_nothing(tmp_path: Path) -> None:
    assert read_file(write(tmp_path, "")).values == {}
    assert read_environment({"DEAR_TRAIN_LR": "", "DEAR_TRAIN_CONFIG": "f", "LR": "1"}).values == {}


def test_a_misspelled_variable_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="DEAR_TRAIN_EPOCH .*did you mean 'DEAR_TRAIN_EPOCHS'"):
        read_environment({"DEAR_TRAIN_EPOCH": "3"})


def test_pairs_in_a_variable_are_words() -> None:
    layer = read_environment({"DEAR_TRAIN_TASK_OPTION": "width=8 prompt='def f'"})
    assert layer.values == {"task_options": {"width": "8", "prompt": "def f"}}


def test_settings_that_a_newer_version_lacks_do_not_hinder_a_resume() -> None:
    assert from_checkpoint({"seed": 3, "gone": 1}, origin="c").values == {"seed": 3}


def test_a_task_cannot_recommend_what_is_no_setting() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'learning_rate' in the defaults of"):
        from_task({"learning_rate": 1}, task="t")
