"""Where settings come from, and which source wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from dearmpi.cli.main import main
from dearmpi.errors import ConfigError
from dearmpi.train.settings.settings import SETTINGS
from dearmpi.train.settings.sources import (
    SYNONYMS,
    Source,
    describe_overruled,
    from_checkpoint,
    from_task,
    make_source,
    merge,
    read_environment,
    read_file,
    resolve,
)
from tests.codes import raises

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


def flags(**values: object) -> Source:
    return make_source("flag", values)


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
    with raises(ConfigError, "settings-contradict", "--epochs", 3, "--max-steps", 9):
        flags(epochs="3", max_steps="9")


def test_another_optimizer_takes_nothing_of_what_suits_the_tasks_own() -> None:
    settings = resolve([flags(optimizer="SGD"), TASK])
    assert (settings.lr, settings.weight_decay, settings.optimizer_options) == (None, None, {})
    assert settings.batch_size == 16


def test_what_a_user_gives_holds_beside_another_optimizer_above(tmp_path: Path) -> None:
    file = write(tmp_path, "optimizer: AdamW\nlr: 0.05\nweight_decay: 0.1\n")
    settings = resolve([flags(optimizer="SGD"), read_file(file), TASK])
    assert (settings.optimizer, settings.lr, settings.weight_decay) == ("SGD", 0.05, 0.1)


def test_the_same_optimizer_spelled_otherwise_keeps_the_tasks_options() -> None:
    assert resolve([flags(optimizer="adamw"), TASK]).lr == 4e-3


def test_an_option_that_has_a_setting_is_that_setting() -> None:
    task = from_task({"optimizer": "SGD", "optimizer_options": {"momentum": 0.9}}, task="t")
    assert resolve([flags(momentum="0.8"), task]).momentum == 0.8
    chosen = resolve([flags(optimizer_options=["lr=0.1", "nesterov=true"]), task])
    assert (chosen.lr, chosen.momentum) == (0.1, 0.9)
    assert chosen.optimizer_options == {"nesterov": True}
    told = from_checkpoint(chosen.as_plain(), origin="c")
    assert resolve([flags(optimizer_options=["lr=0.1"]), told]) == chosen
    file = make_source("file", {"data": "a"}, origin="f")
    assert resolve([flags(task_options=["data=b"]), file]).data == "b"


def test_an_option_and_its_setting_from_one_source_must_agree() -> None:
    assert flags(lr="0.1", optimizer_options=["lr=0.1"]).values["lr"] == 0.1
    with raises(ConfigError, "given-twice", "--lr", "0.1", "--optimizer-option", "lr=0.2"):
        flags(lr="0.1", optimizer_options=["lr=0.2"])


def test_a_quote_that_does_not_end_is_told() -> None:
    with raises(ConfigError, "malformed-value", "DEAR_TRAIN_TASK_OPTION is", '"prompt=don\'t"'):
        read_environment({"DEAR_TRAIN_TASK_OPTION": "prompt=don't"})


def test_details_of_a_curve_go_with_it() -> None:
    task = from_task({"lr_schedule": "step", "lr_milestones": (0.5,)}, task="t")
    assert resolve([flags(lr_schedule="cosine"), task]).lr_milestones is None
    assert resolve([flags(lr_milestones="0.3,0.6"), task]).lr_milestones == (0.3, 0.6)
    with raises(ConfigError, "setting-without-effect", "lr_milestones"):
        resolve([flags(lr_milestones="0.3,0.6")])


@pytest.mark.parametrize("name", ["seed", "device", "threads", "deterministic", "progress", "data"])
def test_a_task_cannot_recommend_what_comes_before_it(name: str) -> None:
    with raises(ConfigError, "setting-without-effect", name):
        from_task({name: "1"}, task="t")


def test_a_checkpoint_says_nothing_of_the_process_that_goes_on() -> None:
    stored = {"progress": "poll", "stall_abort_s": 9.0, "stall_warning_s": 1.0, "seed": 3}
    stored |= {"cuda_buffers": "direct"}  # MPI was tried as this process was asked to
    assert from_checkpoint(stored, origin="c").values == {"seed": 3}
    assert from_checkpoint({"cuda_buffers": "staged"}, origin="c").values


def test_options_of_several_sources_are_merged_by_name() -> None:
    merged = merge([flags(optimizer_options=["eps=1e-6", "betas=0.5,0.6"]), TASK])
    assert merged["optimizer_options"] == {"eps": 1e-6, "betas": (0.5, 0.6)}
    merged = merge([flags(optimizer_options=["eps=1e-6"]), TASK])
    assert merged["optimizer_options"] == {"eps": 1e-6, "betas": (0.9, 0.99)}


def test_keys_of_the_file_may_be_written_as_flags_are(tmp_path: Path) -> None:
    source = read_file(write(tmp_path, "batch-size: 4\ntask-option: {width: 8}\n"))
    assert source.values == {"batch_size": 4, "task_options": {"width": "8"}}


def test_a_mapping_may_be_merged_into_the_file(tmp_path: Path) -> None:
    source = read_file(write(tmp_path, "batch_size: 4\n<<: {lr: 0.1, batch_size: 8}\n"))
    assert source.values == {"batch_size": 4, "lr": 0.1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batchsize: 4", "unknown setting 'batchsize' in {path}; did you mean 'batch_size'?"),
        ("batchsize: 4", "'batch_size'? dear-train run --help-all lists every setting"),
        ("batch-size: 4\nbatch_size: 5", "batch_size is given twice in {path}"),
        ("lr: 0.1\n\nlr: 0.01", "lr is given twice in {path}, again in line 3; give it once"),
        ("task_option: {a: 1, a: 2}", "a is given twice in {path}"),
        ("name: no", "YAML reads name in {path} as False; put the value in quotes"),
        ("epochs: !!timestamp 3", "{path} is no YAML"),
        ("- epochs", "{path} holds a list; it must hold settings"),
        ("epochs: [", "{path} is no YAML: while parsing"),
        ("lr: 1\nepochs:\t3", "{path} is no YAML: line 2 has a tab where only blanks may stand; "),
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


@pytest.mark.parametrize("name", ["20261121_1", "007", "1.10", "12:30", "2026-11-21", "1e3", "~x"])
def test_a_name_in_a_file_is_that_name_whatever_number_it_spells(tmp_path: Path, name: str) -> None:
    text = f"name: {name}\ntask_option: {{version: {name}}}\n"
    expected = {"name": name, "task_options": {"version": name}}
    assert read_file(write(tmp_path, text)).values == expected


def test_switches_numbers_and_what_is_not_given_are_known_in_a_file(tmp_path: Path) -> None:
    text = """
        deterministic: on
        tensorboard: No
        lr:
        momentum: ~
        seed: null
        batch_size: 1_024
        max_grad_norm: .5
        lr_milestones: [0.5, 0.75]
        optimizer_option: {nesterov: yes, foreach: null, eps: 1e-6, betas: [0.9, .99]}
        task_option: {tied: yes, width: 64}
    """
    assert read_file(write(tmp_path, text)).values == {
        "deterministic": True,
        "tensorboard": False,
        "batch_size": 1024,
        "max_grad_norm": 0.5,
        "lr_milestones": (0.5, 0.75),
        "optimizer_options": {"nesterov": True, "foreach": None, "eps": 1e-6, "betas": (0.9, 0.99)},
        "task_options": {"tied": "true", "width": "64"},
    }


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with raises(ConfigError, "unreadable-file", "nothing.yaml"):
        read_file(tmp_path / "nothing.yaml")


def test_an_empty_file_and_empty_variables_give_nothing(tmp_path: Path) -> None:
    assert read_file(write(tmp_path, "")).values == {}
    assert read_environment({"DEAR_TRAIN_LR": "", "DEAR_TRAIN_CONFIG": "f", "LR": "1"}).values == {}


def test_a_misspelled_variable_is_refused_with_the_nearest() -> None:
    with raises(ConfigError, "unknown-setting", "DEAR_TRAIN_EPOCH", "'DEAR_TRAIN_EPOCHS'"):
        read_environment({"DEAR_TRAIN_EPOCH": "3"})


def test_pairs_in_a_variable_are_words() -> None:
    source = read_environment({"DEAR_TRAIN_TASK_OPTION": "width=8 prompt='def f'"})
    assert source.values == {"task_options": {"width": "8", "prompt": "def f"}}


def test_settings_that_a_newer_version_lacks_do_not_hinder_a_resume() -> None:
    assert from_checkpoint({"seed": 3, "gone": 1}, origin="c").values == {"seed": 3}


def test_a_task_cannot_recommend_what_is_no_setting() -> None:
    with raises(ConfigError, "unknown-setting", "'learning_rate'"):
        from_task({"learning_rate": 1}, task="t")


def test_a_place_that_a_flag_overrules_is_told_with_both_and_the_cure(tmp_path: Path) -> None:
    """Batch scripts give these flags, and who has another value in a file may not know."""
    file = read_file(write(tmp_path, "resume: my runs/a\nrun_folder: runs\nname: c\nseed: 3\n"))
    environment = read_environment({"DEAR_TRAIN_NAME": "b", "DEAR_TRAIN_SEED": "2"})
    script = flags(name="job-17", resume="auto", run_folder="runs", seed="1")
    by_variable, by_name, by_resume = describe_overruled([script, environment, file])
    assert by_variable == (
        "warning: --name job-17 overrules DEAR_TRAIN_NAME, which is b; to have that, end the "
        "command with --name b"
    )
    path = tmp_path / "config.yaml"
    assert f"--name job-17 overrules name in {path}, which is c; to" in by_name
    assert f"--resume auto overrules resume in {path}, which is my runs/a; to" in by_resume
    assert by_resume.endswith("with --resume 'my runs/a'")
    assert not describe_overruled([flags(seed="1"), environment, file])


def test_no_setting_is_called_another_and_all_answers_are_settings() -> None:
    flags = {about.flag.replace("-", "_") for about in SETTINGS.values()}
    assert not SYNONYMS.keys() & (SETTINGS.keys() | flags)
    assert set(SYNONYMS.values()) <= SETTINGS.keys()


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
