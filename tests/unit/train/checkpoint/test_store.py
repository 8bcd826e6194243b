"""A checkpoint gives back every bit that went in."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dearmpi.errors import CheckpointError
from dearmpi.train import checkpoint
from dearmpi.train.checkpoint import PendingCheckpoint, Snapshot
from tests.codes import raises
from tests.unit.train.checkpoint.example_snapshot import content_of, make_snapshot


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8],
)
def test_tensors_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 100, (5, 2)).to(dtype)
    model = {"z": tensor, "empty": torch.empty(0, 3, dtype=dtype), "scalar": tensor[0, 0].clone()}
    loaded = checkpoint.load(
        checkpoint.save(tmp_path, Snapshot(1, model, {"z": {"momentum": tensor}}, [], {}))
    )
    assert list(loaded.model) == ["z", "empty", "scalar"]
    for name, expected in model.items():
        assert loaded.model[name].dtype == dtype
        assert torch.equal(loaded.model[name], expected)
    assert torch.equal(loaded.optimizer["z"]["momentum"], tensor)  # type: ignore[arg-type]


def test_nan_infinity_and_masks_survive(tmp_path: Path) -> None:
    values = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    mask = torch.tensor([True, False])
    loaded = checkpoint.load(
        checkpoint.save(tmp_path, Snapshot(1, {"v": values, "mask": mask}, {}, [], {}))
    )
    assert loaded.model["v"].view(torch.int32).tolist() == values.view(torch.int32).tolist()
    assert loaded.model["mask"].tolist() == [True, False]


def test_a_default_device_of_the_script_s_is_not_that_of_files(tmp_path: Path) -> None:
    """Such as ``torch.set_default_device("cuda")``; ``meta`` has no values to save."""
    values = torch.randn(4, 3)
    with torch.device("meta"):
        loaded = checkpoint.load(checkpoint.save(tmp_path, Snapshot(1, {"v": values}, {}, [], {})))
    assert torch.equal(loaded.model["v"], values)


def test_tied_weights_are_stored_once_and_come_back_tied(tmp_path: Path) -> None:
    embedding = torch.randn(6, 4)
    model = {"embed": embedding, "other": torch.randn(2), "head": embedding}
    path = checkpoint.save(tmp_path, Snapshot(1, model, {}, [], {}))
    assert set(load_file(path / "part-00000.safetensors")) == {"model/embed", "model/other"}
    loaded = checkpoint.load(path)
    assert loaded.model["head"] is loaded.model["embed"]
    assert torch.equal(loaded.model["head"], embedding)


def test_views_of_one_buffer_are_stored_apart(tmp_path: Path) -> None:
    buffer = torch.arange(12.0)
    model = {
        "first": buffer[:6].view(2, 3),
        "second": buffer[6:],
        "overlap": buffer[4:8],
        "whole": buffer,
        "inner": buffer[1:3],
        "transposed": buffer[:6].view(2, 3).t(),
    }
    loaded = checkpoint.load(checkpoint.save(tmp_path, Snapshot(1, model, {}, [], {})))
    for name, expected in model.items():
        assert torch.equal(loaded.model[name], expected)
    path = tmp_path / "checkpoints/step-00000001/part-00000.safetensors"
    assert path.stat().st_size < 4096 + 40 * 4  # a header of one block, and each element once


def test_a_run_folder_that_was_removed_does_not_come_back_for_a_checkpoint(tmp_path: Path) -> None:
    with raises(CheckpointError, "cannot-write", "step-00000001"):
        PendingCheckpoint(tmp_path / "removed", 1).begin()
    assert not (tmp_path / "removed").exists()


def test_loaded_tensors_do_not_depend_on_the_file(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, make_snapshot())
    loaded = checkpoint.load(path)
    (path / "part-00000.safetensors").write_bytes(b"")
    assert torch.equal(loaded.model["weight"], make_snapshot().model["weight"])


def test_options_of_groups_survive(tmp_path: Path) -> None:
    group = {
        "lr": torch.tensor(0.1, dtype=torch.float64),
        "betas": (0.9, 0.999),
        "eps": np.float32(0.1),
        "foreach": None,
        "limit": math.inf,
        "params": ["weight", "bias"],
    }
    snapshot = make_snapshot()
    meta = {"milestones": Counter({30: 1, 60: 2}), "state": (3, (1, 2), None)}
    saved = Snapshot(1, snapshot.model, snapshot.optimizer, [group], meta)
    loaded = checkpoint.load(checkpoint.save(tmp_path, saved))
    assert torch.equal(loaded.groups[0].pop("lr"), group.pop("lr"))  # type: ignore[arg-type]
    assert loaded.groups == [group]
    assert loaded.meta == meta
    assert loaded.optimizer["weight"]["count"] == 3


def test_a_value_that_is_no_plain_data_is_refused_by_name(tmp_path: Path) -> None:
    snapshot = Snapshot(1, {}, {}, [], {"task": {"loss": print}})
    with raises(
        CheckpointError, "value-not-storable", "meta/task/loss", "builtin_function_or_method"
    ):
        checkpoint.save(tmp_path, snapshot)
    assert content_of(tmp_path) == {}
    assert list((tmp_path / "checkpoints").iterdir()) == []
