"""What a rank says of GPUs that it can use, or cannot."""

from __future__ import annotations

import pytest
import torch

from dearmpi.train.ranks import device
from dearmpi.train.ranks.device import VISIBLE, VisibleGpus, look_for_gpus


@pytest.fixture(autouse=True)
def _host_with_four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "glob", lambda pattern: [f"gpu{i}" for i in range(4)])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: fail("No CUDA GPUs are available"))


def fail(words: str) -> None:
    raise RuntimeError(words)


def test_all_that_torch_counts_can_be_used() -> None:
    assert look_for_gpus() == VisibleGpus(4, 4, 4)


def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    gpus = look_for_gpus()
    assert "any of the 4 GPUs of its host" in gpus.describe()
    assert "built without CUDA" in gpus.describe() and "build for CUDA" in gpus.cure
    assert not gpus.is_broken


def test_a_driver_that_is_too_old_for_torch_is_told_in_torchs_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch counts devices by a library that needs no CUDA, and so counts what it cannot use."""

    words = "The NVIDIA driver on your system is too old (found version 12020).\nx"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", lambda: fail(words))
    gpus = look_for_gpus()
    assert gpus.is_broken and gpus.num_usable == 0
    assert gpus.describe().endswith("too old (found version 12020).)")
    assert "that the driver there can run" in gpus.cure


def test_a_driver_that_only_cuda_can_be_asked_about_is_told_in_torchs_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where NVML fails torch asks CUDA, which counts none that it cannot use."""
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", lambda: fail("Error 803: unsupported driver"))
    gpus = look_for_gpus()
    assert gpus.describe().endswith("Error 803: unsupported driver)")
    assert "driver there can run" in gpus.cure and "--gpus-per-node" in gpus.cure
    monkeypatch.setenv(VISIBLE, "")  # they were hidden, so that of the driver nothing is known
    assert look_for_gpus().describe().endswith(f"({VISIBLE} is '')")


@pytest.mark.parametrize(
    ("value", "told"), [(None, f"{VISIBLE} is not set"), ("", f"{VISIBLE} is ''")]
)
def test_gpus_that_a_job_was_not_given_are_told_with_how_to_ask(
    value: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv(VISIBLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VISIBLE, value)
    gpus = look_for_gpus()
    assert told in gpus.describe() and "--gpus-per-node" in gpus.cure
