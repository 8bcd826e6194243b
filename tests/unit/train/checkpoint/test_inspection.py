"""What ``dear-train checkpoint show`` and ``export`` give."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dearmpi.errors import CheckpointError, ConfigError
from dearmpi.train import checkpoint, disk
from dearmpi.train.checkpoint import Snapshot, inspection
from tests.codes import raises


@pytest.fixture
def run(tmp_path: Path) -> Path:
    weight = torch.arange(6.0).view(2, 3)
    snapshot = Snapshot(
        step=1000,
        model={"embed": weight, "norm": torch.ones(5, dtype=torch.bfloat16), "head": weight},
        optimizer={"embed": {"exp_avg": torch.zeros(2, 3)}},
        groups=[{"lr": 0.25, "params": ["embed", "norm"]}],
        meta={"epoch": 3, "configuration": {"task": "digits"}, "random": {"torch": "A" * 9999}},
    )
    checkpoint.save(tmp_path, snapshot)
    return tmp_path


def test_a_checkpoint_is_described(run: Path) -> None:
    lines = inspection.describe(run)
    text = "\n".join(lines)
    for part in (
        "step 1000, written 2",
        "epoch: 3",
        "  task: digits",
        "model: 2 tensors, 11 elements, F32 BF16",
        "head is tied to embed",
        "optimizer: 1 tensors, 6 elements, F32",
        "group 0: 2 parameters, lr 0.25",
        "part-00000.safetensors: ",
    ):
        assert part in text
    assert sum(line.endswith("verified") for line in lines) == 1
    assert max(map(len, lines)) < 200


def test_a_damaged_checkpoint_is_not_described(run: Path) -> None:
    path = run / "checkpoints/step-00001000/part-00000.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with raises(CheckpointError, "checkpoint-damaged", "part-00000.safetensors"):
        inspection.describe(run)


def load_exported(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return load_file(path)
    return torch.load(path, weights_only=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth"])
def test_an_export_is_a_plain_state_dict_with_every_name(run: Path, suffix: str) -> None:
    destination = run / f"model{suffix}"
    inspection.export(run, destination)
    exported = load_exported(destination)
    assert set(exported) == {"embed", "norm", "head"}
    assert torch.equal(exported["head"], torch.arange(6.0).view(2, 3))
    assert exported["norm"].dtype == torch.bfloat16


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_an_export_can_be_read_by_whom_the_umask_lets(run: Path, suffix: str) -> None:
    before = os.umask(0o027)
    try:
        inspection.export(run, run / f"model{suffix}")
    finally:
        os.umask(before)
    assert (run / f"model{suffix}").stat().st_mode & 0o777 == 0o640


def test_an_export_overwrites_only_when_told(run: Path) -> None:
    destination = run / "model.pt"
    destination.write_text("precious")
    with raises(ConfigError, "file-exists", "model.pt"):
        inspection.export(run, destination)
    assert destination.read_text() == "precious"
    inspection.export(run, destination, overwrite=True)
    assert set(load_exported(destination)) == {"embed", "norm", "head"}


def test_an_export_that_fails_leaves_the_old_file(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = run / "model.safetensors"
    destination.write_text("precious")
    before = sorted(os.listdir(run))

    def fail(path: Path) -> None:
        raise OSError("no space")

    monkeypatch.setattr(disk, "sync_file", fail)
    with raises(CheckpointError, "cannot-write"):
        inspection.export(run, destination, overwrite=True)
    assert destination.read_text() == "precious"
    assert sorted(os.listdir(run)) == before


def test_an_unknown_ending_or_place_is_refused(run: Path) -> None:
    with raises(ConfigError, "unknown-choice", "model.onnx"):
        inspection.export(run, run / "model.onnx")
    with raises(CheckpointError, "cannot-write", "nowhere/model.pt"):
        inspection.export(run, run / "nowhere/model.pt")


def test_a_place_below_a_file_is_told_as_what_it_is(run: Path) -> None:
    (run / "file").write_text("")
    with raises(CheckpointError, "cannot-write", "file/model.pt"):
        inspection.export(run, run / "file" / "model.pt")
