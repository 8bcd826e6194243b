"""Blocks that are compiled, or computed again in backprop, train what they train as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dearmpi.comm.world import World
from dearmpi.train.loop import blocks
from dearmpi.train.ranks.agreement import AgreedError
from tests.codes import raises
from tests.mpi.session.points import run, saved_model


@pytest.mark.parametrize(
    "given",
    [
        {"activation_checkpointing": True},
        pytest.param({"compile": True}, marks=pytest.mark.slow),
        {"compile": True, "activation_checkpointing": True},
    ],
    ids=["checkpointed", "compiled", "both"],
)
def test_blocks_train_what_they_train_as_they_are(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, object]
) -> None:
    monkeypatch.setattr(blocks, "BACKEND", "aot_eager")
    options: dict[str, object] = {"task_options": ["model=blocks", "dropout=0.3"], "lr": 0.02}
    assert run(world, folder, "plain", **options) == 0
    assert run(world, folder, "a", **options, **given) == 0
    world.barrier()
    expected, found = saved_model(folder, "plain", 12), saved_model(folder, "a", 12)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    torch.compiler.reset()


def test_a_model_without_blocks_is_refused(world: World, folder: Path) -> None:
    with raises(AgreedError, "setting-without-effect", "compile"):
        run(world, folder, "a", compile=True)
