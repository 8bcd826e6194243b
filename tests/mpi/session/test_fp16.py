"""A run in fp16: what it computes, what it skips, and that its scale goes on."""

from __future__ import annotations

from pathlib import Path

import torch

from dearmpi.comm.backends.alone import AloneCollectives
from dearmpi.comm.world import World
from dearmpi.train import checkpoint
from dearmpi.train.metrics import metrics
from dearmpi.train.ranks.stop import EXIT_PREEMPTED
from tests.mpi.session.points import run, saved_model


def test_fp16_trains_what_one_process_does_within_its_rounding(world: World, folder: Path) -> None:
    # A loss so small that no gradient overflows, which would be other steps on other ranks.
    options = {"precision": "fp16", "lr": 50.0, "task_options": ["scale=0.001"]}
    assert run(world, folder, "a", **options) == 0
    world.barrier()
    if world.is_root:
        alone = World(AloneCollectives(), progress="poll")
        assert run(alone, folder, "b", **options) == 0
        alone.close()
        found = saved_model(folder, "a", 12)
        for name, tensor in saved_model(folder, "b", 12).items():
            assert found[name].dtype == torch.float32
            torch.testing.assert_close(found[name], tensor, rtol=0.02, atol=0.005)
    world.barrier()


def test_a_gradient_that_overflows_on_one_rank_skips_the_step_on_all(
    world: World, folder: Path
) -> None:
    # No other gradient overflows, however few samples a rank has.
    options: dict[str, object] = {
        "precision": "fp16",
        "task_options": ["wrong=overflow", "scale=0.001"],
    }
    assert run(world, folder, "a", max_steps=3, max_grad_norm=1.0, **options) == 0
    assert run(world, folder, "b", max_steps=2, max_grad_norm=1.0, **options) == 0
    world.barrier()
    after, before = saved_model(folder, "a", 3), saved_model(folder, "b", 2)
    assert all(torch.equal(after[name], before[name]) for name in after)
    saved = checkpoint.load(folder / "runs" / "a" / "checkpoints" / "step-00000003")
    assert saved.meta["scaler"]["scale"] == 2.0**15
    assert all(row.grad_norm is None for row in metrics.read(folder / "runs" / "a"))


def test_a_run_in_fp16_resumes_bit_by_bit(world: World, folder: Path) -> None:
    options: dict[str, object] = {"precision": "fp16", "lr": 0.05}
    assert run(world, folder, "whole", **options) == 0
    options["task_options"] = ["wrong=stop"]
    assert run(world, folder, "a", **options) == EXIT_PREEMPTED
    world.barrier()
    assert run(world, folder, "a", resume="auto", **options) == 0
    world.barrier()
    whole, parts = saved_model(folder, "whole", 12), saved_model(folder, "a", 12)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
