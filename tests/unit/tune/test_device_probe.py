"""The trial of device memory: what it is made on."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from dearmpi.tune import device_probe


@pytest.mark.parametrize(("count", "expected"), [(1, "cuda:0"), (2, "cuda:1"), (4, "cuda:1")])
def test_each_rank_tries_a_device_of_its_own_if_there_are_two(
    count: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert device_probe._device_of(0, "cuda") == "cuda:0"
    assert device_probe._device_of(1, "cuda") == expected
    assert [f"cuda:{index}" for index in current] == ["cuda:0", expected]
    assert device_probe._device_of(1, "cpu") == "cpu"


def test_a_process_of_its_own_can_ask_the_library_for_cuda() -> None:
    command = [sys.executable, "-c", device_probe._CLAIMS_CUDA]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert asked.stdout.strip() in ("True", "False"), asked.stderr


def test_output_that_is_no_text_is_reported_too() -> None:
    code = "import sys; sys.stdout.buffer.write(b'\\xff died'); sys.exit(3)"
    verdicts = device_probe.probe("cpu", program=(sys.executable, "-c", code))
    assert [one.operation for one in verdicts] == list(device_probe.OPERATIONS)
    assert not any(one.works for one in verdicts) and "died" in verdicts[0].output
