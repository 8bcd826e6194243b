"""A moving average of the parameters: what it holds, what is evaluated, and that it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dearmpi.comm.backends.alone import AloneCollectives
from dearmpi.comm.world import World
from dearmpi.train.checkpoint.inspection import export
from dearmpi.train.metrics import metrics
from dearmpi.train.ranks.agreement import AgreedError
from dearmpi.train.ranks.stop import EXIT_PREEMPTED
from tests.codes import raises
from tests.mpi.session.points import run, saved_model
from tests.mpi.session.test_training import plain_training

DECAY = 0.8


def plain_average(num_steps: int) -> nn.Module:
    kept: list[AveragedModel] = []

    def follow(model: nn.Module) -> None:
        if not kept:
            kept.append(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY)))
        kept[0].update_parameters(model)

    plain_training(num_steps, dtype=torch.float64, follow=follow)
    module: nn.Module = kept[0].module
    return module


def held_out_loss(model: nn.Module) -> float:
    inputs = torch.randn(11, 6, generator=torch.Generator().manual_seed(11))
    targets = torch.stack([row.sum().sin().reshape(1) for row in inputs])
    with torch.no_grad():
        return nn.functional.mse_loss(model(inputs.double()), targets.double()).item()


def exported(folder: Path, name: str) -> dict[str, Tensor]:
    path = folder / f"{name}.pt"
    export(folder / "runs" / name, path)
    found: dict[str, Tensor] = torch.load(path)
    return found


@pytest.mark.parametrize(
    "given",
    [{}, {"schedule": "serial"}, {"max_grad_norm": 1e6}, {"gradient_accumulation_steps": 2}],
    ids=["dear", "serial", "clipping", "accumulation"],
)
def test_any_number_of_ranks_averages_what_one_process_does(
    world: World, folder: Path, given: dict[str, object]
) -> None:
    assert run(world, folder, "a", ema=DECAY, eval_interval=4, **given) == 0
    world.barrier()
    if world.is_root:
        for name, tensor in plain_average(12).state_dict().items():
            torch.testing.assert_close(exported(folder, "a")[name], tensor, rtol=1e-10, atol=1e-12)
            (folder / "a.pt").unlink()
        for name, tensor in plain_training(12, dtype=torch.float64).items():
            torch.testing.assert_close(
                saved_model(folder, "a", 12)[name], tensor, rtol=1e-10, atol=1e-12
            )
        losses = {row.step: row.eval_loss for row in metrics.read(folder / "runs" / "a")}
        for step in (4, 8, 12):
            assert losses[step] == pytest.approx(held_out_loss(plain_average(step)), rel=1e-6)


def test_a_run_with_an_average_resumes_bit_by_bit(world: World, folder: Path) -> None:
    options = {"ema": DECAY, "task_options": ["dropout=0.2"]}
    assert run(world, folder, "whole", **options) == 0
    options["task_options"] = ["dropout=0.2", "wrong=stop"]
    assert run(world, folder, "a", **options) == EXIT_PREEMPTED
    world.barrier()
    assert run(world, folder, "a", resume="auto", **options) == 0
    world.barrier()
    whole, parts = saved_model(folder, "whole", 12), saved_model(folder, "a", 12)
    assert any(name.startswith("@") for name in whole) and whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_an_average_goes_on_on_one_process(world: World, folder: Path) -> None:
    assert run(world, folder, "a", ema=DECAY, max_steps=7) == 0
    world.barrier()
    if world.is_root:
        alone = World(AloneCollectives(), progress="poll")
        assert run(alone, folder, "a", resume="auto", max_steps=12) == 0
        alone.close()
        found = exported(folder, "a")
        for name, tensor in plain_average(12).state_dict().items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12)
    world.barrier()


def test_the_average_stays_the_same_in_a_resumed_run(world: World, folder: Path) -> None:
    assert run(world, folder, "a", ema=DECAY, max_steps=2) == 0
    world.barrier()
    with raises(AgreedError, "resumed-setting-changed", 0.5, DECAY):
        run(world, folder, "a", ema=0.5, resume="auto")
