"""A script's own ``Run`` with local steps: saved, resumed on any number of ranks, refused."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dearmpi
from dearmpi import Codasca, DistributedOptimizer, LocalOptimizer, Run, Scaffnew
from dearmpi.comm.world import World
from dearmpi.errors import ConfigError
from dearmpi.train import checkpoint
from dearmpi.train.checkpoint.inspection import export
from dearmpi.train.metrics import metrics
from dearmpi.train.ranks.agreement import AgreedError
from dearmpi.train.ranks.stop import StopRequest
from tests.codes import raises
from tests.fakes.ranks import run_ranks

Make = Callable[[nn.Module, World], Any]
INPUTS = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
SMALL = dearmpi.EngineConfig(bucket_cap_mb=1e-5)
_building = threading.Lock()  # the random state is the process's


@pytest.fixture(autouse=True)
def _ranks_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals are for the main thread."""
    monkeypatch.setattr(StopRequest, "__enter__", lambda self: self)
    monkeypatch.setattr(StopRequest, "__exit__", lambda *_: None)


def streaming(model: nn.Module, world: World, **more: Any) -> LocalOptimizer:
    inner = torch.optim.AdamW(model.parameters(), lr=0.02)
    given: dict[str, Any] = {"sync_every": 6, "fragments": 2, "delay": 2, "compress": "none"}
    return LocalOptimizer(inner, model, world=world, config=SMALL, **{**given, **more})


def dense_first(model: nn.Module, world: World) -> LocalOptimizer:
    return streaming(model, world, sync_after=5)


def codasca(model: nn.Module, world: World) -> Codasca:
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    return Codasca(inner, model, sync_every=4, world=world)


def tamuna(model: nn.Module, world: World) -> Scaffnew:
    return Scaffnew(model.parameters(), model, lr=0.05, p=0.3, sparsity=2, cohort=2, world=world)


def averaged(model: nn.Module, world: World) -> DistributedOptimizer:
    return DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model, world=world)


def train(
    world: World, folder: Path, make: Make, num_steps: int, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], list[Tensor]]:
    """This rank's parameters in the end, and the shared ones."""
    with _building:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)
    optimizer = make(model, world)
    with Run(folder, model, optimizer, log_interval=1) as run:
        run.resume()
        for indices in run.sampler(len(INPUTS), batch_size=12, num_steps=num_steps):
            rows = INPUTS[indices].to(dtype)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(rows), rows.sum(1, keepdim=True).sin())
            loss.backward()
            optimizer.step()
            run.log(loss)
    own = [param.detach().clone() for param in model.parameters()]
    with optimizer.at_anchor():
        shared = [param.detach().clone() for param in model.parameters()]
    optimizer.close()
    return own, shared


CASES: list[tuple[Make, int, torch.dtype]] = [
    *((streaming, stop, torch.float32) for stop in (6, 7)),
    (streaming, 7, torch.bfloat16),
    *((dense_first, stop, torch.float32) for stop in (4, 7)),
    *((codasca, 6, dtype) for dtype in (torch.float32, torch.bfloat16)),
    *((tamuna, 7, dtype) for dtype in (torch.float32, torch.bfloat16)),
]


@pytest.mark.parametrize(("make", "stop", "dtype"), CASES)
def test_a_resumed_script_goes_on_bit_for_bit(
    tmp_path: Path, make: Make, stop: int, dtype: torch.dtype
) -> None:
    def run(folder: str, num_steps: int) -> list[tuple[list[Tensor], list[Tensor]]]:
        return run_ranks(2, lambda world: train(world, tmp_path / folder, make, num_steps, dtype))

    whole = run("whole", 15)
    run("parts", stop)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed = run("parts", 15)
    for expected, found in zip(whole, resumed, strict=True):
        for kind in (0, 1):
            assert all(torch.equal(a, b) for a, b in zip(expected[kind], found[kind], strict=True))
    rows = {folder: metrics.read(tmp_path / folder) for folder in ("whole", "parts")}
    assert [row.step for row in rows["parts"]] == list(range(1, 16))
    assert [row.loss for row in rows["parts"]] == [row.loss for row in rows["whole"]]
    export(tmp_path / "parts", tmp_path / "model.pt")
    shown = torch.load(tmp_path / "model.pt").values()
    assert all(torch.equal(a, b) for a, b in zip(shown, whole[0][1], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 3])
def test_other_numbers_of_ranks_go_on_from_what_is_shared(
    tmp_path: Path, size: int, dtype: torch.dtype
) -> None:
    (_, shared), _ = run_ranks(2, lambda world: train(world, tmp_path, streaming, 7, dtype))

    saved = checkpoint.load(checkpoint.resolve(tmp_path)).optimizer

    def resume(world: World) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)
        optimizer = streaming(model, world)
        with Run(tmp_path, model, optimizer) as run:
            assert run.resume() == 7
            for name, param in model.named_parameters():
                for key in ("exp_avg", "exp_avg_sq"):
                    own: list[Any] = [saved[name][f"rank{rank}.{key}"] for rank in range(2)]
                    assert not torch.equal(*own)
                    found = optimizer.state[param][key]
                    torch.testing.assert_close(found, torch.stack(own).mean(0).view_as(found))
            return [param.detach().clone() for param in model.parameters()]

    with pytest.warns(UserWarning, match=f"rank 0 of 2 and is loaded on {size} ranks"):
        found = run_ranks(size, resume)
    for own in found:
        assert all(torch.equal(a, b) for a, b in zip(own, shared, strict=True))
    with pytest.warns(UserWarning, match="go on from the shared values of step 7"):
        ends = run_ranks(size, lambda world: train(world, tmp_path, streaming, 15, dtype))
    assert all(torch.equal(a, b) for a, b in zip(ends[0][1], ends[-1][1], strict=True))
    assert checkpoint.load(checkpoint.resolve(tmp_path)).step == 15


def test_control_variates_of_another_number_of_ranks_begin_at_zero(tmp_path: Path) -> None:
    (_, shared), _ = run_ranks(2, lambda world: train(world, tmp_path, tamuna, 5))

    def resume(world: World) -> None:
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = tamuna(model, world)
        with Run(tmp_path, model, optimizer) as run:
            assert run.resume() == 5
        for param, value in zip(model.parameters(), shared, strict=True):
            assert torch.equal(param, value)
        assert optimizer.num_rounds > 0
        assert not any(control.any() for control in optimizer.controls.values())
        optimizer.close()

    with pytest.warns(UserWarning, match="control variates of 2 ranks do not fit the data of 3"):
        run_ranks(3, resume)


def test_a_checkpoint_of_another_kind_of_training_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(6, 1)

    def run(world: World, folder: str, make: Make, *, resumes: bool) -> None:
        own = copy.deepcopy(model)
        with Run(tmp_path / folder, own, make(own, world)) as script:
            if resumes:
                script.resume()
            else:
                script.log(0.0)

    for first, second in ((averaged, streaming_whole), (streaming_whole, averaged)):
        name = first.__name__
        run_ranks(2, partial(run, folder=name, make=first, resumes=False))
        with raises(AgreedError, "checkpoint-of-other-model", "local steps", "averaged gradients"):
            run_ranks(2, partial(run, folder=name, make=second, resumes=True))


def streaming_whole(model: nn.Module, world: World) -> LocalOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    return LocalOptimizer(inner, model, sync_every=4, compress="none", world=world)


def test_what_local_steps_lack_is_refused(alone: World, tmp_path: Path) -> None:
    model = nn.ModuleDict({"one": nn.Linear(6, 1), "two": nn.Linear(6, 1)})
    local, dense = streaming_whole(model["one"], alone), averaged(model["two"], alone)
    for several in ([local, dense], [dense, local], [local]):
        with raises(ConfigError, "settings-contradict", "LocalOptimizer"):
            Run(tmp_path, model, several)  # type: ignore[arg-type]
    with raises(ConfigError, "settings-contradict", "trace", "LocalOptimizer"):
        Run(tmp_path, model["one"], local, trace=(2, 4))
    with (
        Run(tmp_path, model["one"], local) as run,
        raises(ConfigError, "settings-contradict", "shares", "LocalOptimizer"),
    ):
        run.sampler(40, batch_size=4, num_steps=5, shares="auto")


def test_groups_of_a_job_do_not_move_their_shares(tmp_path: Path) -> None:
    def rank(world: World) -> None:
        group = world.split(world.rank // 2)
        assert group is not None
        optimizer = averaged(model := nn.Linear(6, 1), group)
        with Run(tmp_path / str(world.rank // 2), model, optimizer) as run:
            with raises(ConfigError, "settings-contradict", "shares", "2 of 4 ranks"):
                run.sampler(40, batch_size=4, num_steps=5, shares="auto")
            run.sampler(40, batch_size=4, num_steps=5, shares=(3, 1))
        optimizer.close()

    run_ranks(4, rank)
