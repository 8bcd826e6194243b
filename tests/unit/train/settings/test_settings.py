"""Settings of a run: types, bounds, contradictions, and what a resumed run must keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dearmpi.errors import ConfigError
from dearmpi.train.settings.settings import SETTINGS, RunSettings, check_resumable
from dearmpi.train.settings.sources import from_checkpoint, make_source, read_file, resolve
from tests.codes import raises


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("epochs", "3", 3),
        ("lr", "1e-3", 1e-3),
        ("checkpoint_interval", "auto", "auto"),
        ("checkpoint_interval", "7", 7),
        ("deterministic", "yes", True),
        ("deterministic", False, False),
        ("data", "some/path", "some/path"),
        ("max_time_s", "90", 90.0),
        ("max_time_s", 90, 90.0),
        ("max_time_s", "1.5h", 5400.0),
        ("max_time_s", "2d", 172800.0),
        ("lr_milestones", "0.3,0.6", (0.3, 0.6)),
        ("lr_milestones", [0.3, 0.6], (0.3, 0.6)),
        ("task_options", ["width=64", "data=a=b"], {"width": "64", "data": "a=b"}),
        ("task_options", "width=64 name='two words'", {"width": "64", "name": "two words"}),
        ("task_options", {"width": 64, "tied": True}, {"width": "64", "tied": "true"}),
        ("optimizer_options", ["betas=0.9,0.99", "nesterov=true"], None),
        ("optimizer_options", {"betas": [0.9, 0.99]}, {"betas": (0.9, 0.99)}),
    ],
)
def test_values_of_flags_and_files_are_converted(name: str, text: object, value: object) -> None:
    expected = {"betas": (0.9, 0.99), "nesterov": True} if value is None else value
    assert SETTINGS[name].convert(text, label=name) == expected


@pytest.mark.parametrize("name", [name for name, about in SETTINGS.items() if about.choices])
def test_the_nearest_choice_of_every_setting_is_suggested(name: str) -> None:
    for choice in SETTINGS[name].choices:
        for wrong in {f"{choice}x", choice[:1] + choice, choice.upper()}:
            if wrong not in SETTINGS[name].choices:
                with pytest.raises(ConfigError, match=rf"; did you mean '{choice}'\? "):
                    make_source("flag", {name: wrong})


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("compress", "int6", "int8"),
        ("device", "gpu", "cuda"),
        ("update_on", "gpu", "device"),
        ("update_on", "cpu", "host"),
        ("precision", "float16", "fp16"),
        ("precision", "bfloat16", "bf16"),
        ("comm_dtype", "float32", "fp32"),
        ("no_decay", "norms,bias", "biases"),
    ],
)
def test_what_others_call_a_choice_leads_to_ours(name: str, value: str, meant: str) -> None:
    with raises(ConfigError, "unknown-choice", f"did you mean '{meant}'? choose one of"):
        make_source("flag", {name: value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("epochs", "2.5", "--epochs is '2.5'; it must be a whole number"),
        ("epochs", "0", "--epochs is 0; it must be at least 1"),
        ("epochs", True, "whole number"),
        ("lr", "fast", "--lr is 'fast'; it must be a number"),
        ("lr", "nan", "must be a finite number"),
        ("lr", "-1", "--lr is -1.0; it must be at least 0"),
        ("bucket_cap_mb", "0", "it must be above 0"),
        ("lr_gamma", "1.5", "it must be at most 1"),
        ("deterministic", "maybe", "true or false"),
        ("schedule", "horovod", "choose one of serial, wfbp, dear"),
        ("lr_milestones", "a,b", "must be a number"),
        ("task_options", ["width"], "--task-option 'width' must be NAME=VALUE"),
        ("task_options", ["width=1", "width=2"], "--task-option gives width twice"),
        ("data", ["a"], "must be text"),
        ("data", "", "--data is empty or blank; give a value, or leave it out"),
        ("data", " ", "--data is empty or blank"),
        ("name", "", "--name is empty"),
        ("task", "", "--task is empty"),
        ("task_options", ["data="], "--task-option data= is empty"),
        ("max_time_s", "1:30", "90s, 45m, 1.5h, 1d) is '1:30'; it must be a number"),
        ("max_time_s", "m", "--max-time is ''; it must be a number"),
        ("max_time_s", "0m", "--max-time is 0.0; it must be above 0"),
    ],
)
def test_wrong_values_are_refused_by_the_name_the_user_gave(
    name: str, value: object, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_source("flag", {name: value})
    assert message in str(caught.value)


def test_settings_are_checked_where_they_are_made() -> None:
    with raises(ConfigError, "out-of-range", "batch_size is", 0, 1):
        RunSettings(batch_size=0)


@pytest.mark.parametrize(
    ("values", "refused"),
    [
        (
            {"epochs": 2, "max_steps": 10},
            ("settings-contradict", "epochs is", "2", "max_steps is", "10"),
        ),
        (
            {"warmup_steps": 5, "warmup_epochs": 1.0},
            ("settings-contradict", "warmup_steps is", "5", "warmup_epochs is", "1.0"),
        ),
        ({"lr_gamma": 0.5}, ("setting-without-effect", "lr_gamma", "lr_schedule", "'constant'")),
        ({"lr_milestones": (0.5,), "lr_schedule": "cosine"}, ("setting-without-effect",)),
        ({"lr_milestones": (0.7, 0.5), "lr_schedule": "step"}, ("out-of-range",)),
        ({"lr_milestones": (30.0, 60.0), "lr_schedule": "step"}, ("out-of-range",)),
        (
            {"deterministic": True, "reduce_scatter": "auto"},
            ("settings-contradict", "reduce_scatter"),
        ),
        (
            {"comm_dtype": "bf16", "reduce_scatter": "native"},
            ("settings-contradict", "'ring'", "'exchange'"),
        ),
        ({"checkpoint_interval": "auto"}, ("setting-missing", "mtbf_hours")),
        ({"mtbf_hours": 5}, ("setting-without-effect", "mtbf_hours is 5", "auto")),
        (
            {"checkpoint_interval": "auto", "mtbf_hours": 5, "checkpoint_time_s": 60},
            ("settings-contradict", "checkpoint_time is 60 s"),
        ),
        ({"deterministic": True, "plan": "auto"}, ("settings-contradict",)),
        ({"deterministic": True, "plan": "bayes"}, ("settings-contradict",)),
        ({"plan": "bayes", "bucket_cap_mb": 8}, ("settings-contradict", "bucket_cap_mb is", "8.0")),
        ({"data": "a", "task_options": {"data": "b"}}, ("given-twice", "data is")),
    ],
)
def test_contradictions_are_refused(values: dict[str, object], refused: tuple[str, ...]) -> None:
    with raises(ConfigError, *refused):
        RunSettings(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("schedule", "wfbp"),
        ("gather", "gradients"),
        ("bucket_cap_mb", 3.0),
        ("reduce_scatter", "exchange"),
        ("comm_dtype", "bf16"),
        ("cuda_buffers", "staged"),
        ("update_on", "host"),
        ("window", 3),
    ],
)
def test_the_engine_gets_what_was_chosen(name: str, value: Any) -> None:
    assert getattr(RunSettings(**{name: value}).engine(), name) == value


def test_the_update_waits_only_where_the_norm_of_the_gradient_is_needed() -> None:
    assert RunSettings(on_nan="skip").engine().eager
    assert not RunSettings(max_grad_norm=1.0).engine().eager


@pytest.mark.parametrize(
    ("given", "is_open"),
    [
        ({}, True),
        ({"max_grad_norm": 1.0, "comm_dtype": "bf16"}, True),
        ({"plan": "none"}, False),
        ({"deterministic": True}, False),
        ({"bucket_cap_mb": 8}, False),
        ({"schedule": "wfbp"}, False),
    ],
)
def test_only_what_nobody_has_fixed_may_follow_from_measured_times(
    given: dict[str, object], is_open: bool
) -> None:
    assert RunSettings(**given).leaves_buckets_open() is is_open  # type: ignore[arg-type]


def test_the_written_config_reads_back_as_the_same_settings(tmp_path: Path) -> None:
    settings = RunSettings(
        task="digits",
        task_options={
            "width": "8",
            "tied": "true",
            "version": "1.10",
            "prompt": "12:30",
            "a": "no",
        },
        data="007",
        optimizer_options={"betas": (0.9, 0.99), "foreach": None, "amsgrad": True, "eps": 1e-7},
        lr=1e-5,
        max_steps=7,
        lr_schedule="step",
        lr_milestones=(0.25, 0.5),
        trace=(10, 20),
    )
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings.as_plain(), sort_keys=False))
    assert resolve([read_file(path)]) == settings


def test_a_resumed_run_may_be_longer_but_not_of_another_batch_size() -> None:
    stored = RunSettings(epochs=2, batch_size=32, log_interval=5).as_plain()
    check_resumable(stored, RunSettings(max_steps=900, batch_size=32, log_interval=1, threads=2))
    with pytest.raises(ConfigError) as caught:
        check_resumable(stored, RunSettings(epochs=2, batch_size=16))
    assert "batch_size is 16, but the run to resume has 32" in str(caught.value)
    assert "--batch-size" in str(caught.value)


def test_a_resumed_run_keeps_options_that_were_not_given() -> None:
    stored = RunSettings(momentum=0.9, optimizer="SGD").as_plain()
    with raises(ConfigError, "resumed-setting-changed", "momentum is", "0.9"):
        check_resumable(stored, RunSettings(optimizer="SGD"))


def test_with_a_plan_only_what_the_user_says_about_buckets_counts() -> None:
    stored = RunSettings(window=4, bucket_cap_mb=8).as_plain()
    chosen = [make_source("flag", {"plan": "auto"}), from_checkpoint(stored, origin="step-1")]
    settings = resolve(chosen)
    assert (settings.window, settings.bucket_cap_mb) == (2, None)
    searching = resolve([make_source("flag", {"plan": "bayes"}), chosen[1]])
    assert (searching.window, searching.bucket_cap_mb) == (4, None)
    assert resolve([make_source("environment", {"window": "4"}), *chosen]).window == 4  # refused


def test_every_setting_has_a_flag_of_its_own() -> None:
    flags = [about.flag for about in SETTINGS.values()]
    assert len(set(flags)) == len(flags)
    assert all(about.help for about in SETTINGS.values())


def test_the_file_of_a_task_may_lie_in_another_folder_by_now() -> None:
    stored = RunSettings(task="here/mine.py:build").as_plain()
    check_resumable(stored, RunSettings(task="/there/mine.py:build"))
    for other in ("here/mine.py:other", "here/yours.py:build", "mine:build"):
        with raises(ConfigError, "resumed-setting-changed", "--task"):
            check_resumable(stored, RunSettings(task=other))
