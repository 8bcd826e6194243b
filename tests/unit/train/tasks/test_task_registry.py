"""Tasks by name, and tasks that cannot be trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dearmpi.errors import DataError, DearError, TaskError
from dearmpi.train.tasks import task as task_module
from dearmpi.train.tasks import task_registry as registry
from dearmpi.train.tasks.task import Task, check_task_name
from dearmpi.train.tasks.task_registry import build_task
from tests.codes import raises


def loss(model: nn.Module, batch: Any) -> Tensor:
    result: Tensor = model(batch).mean()
    return result


def planted(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Make ``build_task("planted", ...)`` give a small task with ``changes``."""

    def build(options: Mapping[str, str]) -> Task:
        parts: dict[str, Any] = {"model": nn.Linear(1, 1), "train_data": [1.0], "loss": loss}
        return Task(name="planted", **{**parts, **changes})

    monkeypatch.setattr(registry, "_BUILDERS", {"planted": build})


@pytest.mark.parametrize("name", ["bytes-ml", "byteslm", "bytes_lm"])
def test_an_unknown_task_gets_the_nearest_and_all_known(name: str) -> None:
    with raises(TaskError, "unknown-choice", "'", name, "'; did you mean '", "bytes-lm'") as raised:
        build_task(name, {})
    assert all(form in str(raised.value) for form in ("digits", "images", "synthetic:NAME"))
    assert "path/to/file.py:function" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "text", "meant"),
    [
        ("sine", "def sine(options): ...\ndef _own(options): ...\n", "sine.py:sine"),
        ("sine", "def a(x): ...\ndef make(o) -> dearmpi.Task: ...\n", "sine.py:make"),
        ("sine", "def a(x): ...\ndef b(x): ...\n", "sine.py:a or sine.py:b"),
        ("sine", "def broken(", "sine.py:FUNCTION"),
        ("sine.py", "def sine(options): ...\n", "sine.py:sine"),
    ],
)
def test_a_file_beside_says_what_was_meant(
    name: str, text: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sine.py").write_text(text)
    with pytest.raises(TaskError) as caught:
        check_task_name(name)
    assert str(caught.value).endswith(f" {meant}")


def test_names_are_told_without_their_builders() -> None:
    assert set(task_module.BUILT_IN) == set(registry._BUILDERS)


def test_known_names_reach_their_builders() -> None:
    tiny = {"context": "8", "width": "8", "depth": "1", "heads": "1", "max_bytes": "50000"}
    assert build_task("bytes-lm", tiny).name == "bytes-lm"
    with raises(TaskError, "unknown-choice"):
        build_task("synthetic:nothing", {})


@pytest.mark.parametrize("name", ["synthetic", "synthetic:"])
def test_synthetic_without_a_name_lists_the_names(name: str) -> None:
    with raises(TaskError, "unknown-choice", "bert-base", "bert-large", "resnet50"):
        build_task(name, {})


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}


class WithComplexBuffer(nn.Linear):
    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.register_buffer("freqs", torch.zeros(2, dtype=torch.complex128))


@pytest.mark.parametrize(
    ("changes", "error", "refused"),
    [
        ({"train_data": []}, DataError, ("data-insufficient", "data is", "0")),
        ({"eval_data": []}, DataError, ("data-insufficient", "data is", "0")),
        ({"train_data": 3}, TaskError, ("task-invalid",)),
        ({"eval_data": iter([1])}, TaskError, ("task-invalid",)),
        ({"model": loss}, TaskError, ("task-invalid", "model is", "torch.nn.Module")),
        ({"model": nn.ReLU()}, TaskError, ("nothing-to-train",)),
        ({"units_per_sample": 0}, TaskError, ("task-invalid", "units_per_sample is", "0")),
        (
            {"model": WithComplexBuffer(1)},
            TaskError,
            ("value-not-storable", "'freqs'", "torch.complex128"),
        ),
        ({"model": WithExtraState(1, 1)}, TaskError, ("value-not-storable", "_extra_state")),
    ],
)
def test_a_task_that_cannot_be_trained_is_refused(
    changes: dict[str, Any],
    error: type[DearError],
    refused: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planted(monkeypatch, **changes)
    with raises(error, *refused):
        build_task("planted", {})


def test_a_sound_task_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, defaults={"lr": 1, "epochs": 2}, eval_data=[2.0])
    assert build_task("planted", {}).name == "planted"
