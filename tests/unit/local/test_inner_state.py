"""Inner optimizers' state, averaged where a user asks for it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from dearmpi import LocalOptimizer
from dearmpi.comm.world import World
from dearmpi.errors import ConfigError, MismatchError
from tests.codes import raises
from tests.fakes.ranks import run_ranks
from tests.mpi.local_steps import Case, adamw, backward, steps_of
from tests.mpi.models import build_model
from tests.mpi.oracle import copies

KEYS = ("exp_avg", "exp_avg_sq")
STREAMING = Case(sync_every=6, fragments=2, delay=2, mix=0.5)


def play(num_steps: int, every: int) -> dict[str, Tensor]:
    """One process plays two ranks that average parameters and state at every ``every``-th step."""
    models = [build_model("dense") for _ in range(2)]
    inners = [adamw(model.parameters()) for model in models]
    for step in range(1, num_steps + 1):
        for rank, (model, inner) in enumerate(zip(models, inners, strict=True)):
            backward(model, step - 1, rank)
            inner.step()
        if step % every:
            continue
        for params in zip(*(model.parameters() for model in models), strict=True):
            states = [inner.state[param] for inner, param in zip(inners, params, strict=True)]
            for values in (
                [param.data for param in params],
                *([state[key] for state in states] for key in KEYS),
            ):
                mean = torch.stack(values).mean(0)
                for value in values:
                    value.copy_(mean)
    return copies(models[0])


def test_averages_of_parameters_and_state_equal_one_process() -> None:
    def train(world: World) -> dict[str, Tensor]:
        model = build_model("dense")
        inner = adamw(model.parameters())
        optimizer = LocalOptimizer.average(inner, model, sync_every=3, state="average", world=world)
        steps_of(model, optimizer, range(12))
        optimizer.close()
        return copies(model)

    expected = play(12, 3)
    for found in run_ranks(2, train):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


def test_the_state_of_a_fragment_is_equal_after_its_merge_alone() -> None:
    def train(world: World) -> dict[str, dict[str, Tensor]]:
        model = build_model("dense")
        optimizer = STREAMING.optimizer(model, world, state="average")
        steps_of(model, optimizer, range(5))  # fragment 1 is merged
        found = {
            name: {key: optimizer.state[param][key].clone() for key in KEYS}
            for name, param in model.named_parameters()
            if param in optimizer.state
        }
        merged = set(optimizer.fragments[1])
        optimizer.close()
        return {("merged " if name in merged else "own ") + name: of for name, of in found.items()}

    one, other = run_ranks(2, train)
    assert one.keys() == other.keys()
    for name, entries in one.items():
        equal = all(torch.equal(entries[key], other[name][key]) for key in KEYS)
        assert equal == name.startswith("merged"), name


def test_state_that_one_rank_lacks_stays_the_others_own() -> None:
    def train(world: World) -> list[Tensor]:
        model = build_model("dense")
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = LocalOptimizer.average(inner, model, sync_every=2, state="average", world=world)
        first, *rest = model.parameters()
        for _ in range(2):
            for param in rest if world.rank else (first, *rest):
                param.grad = torch.full_like(param, 1.0 + world.rank)
            optimizer.step()
        optimizer.close()
        return [inner.state[param].get("momentum_buffer") for param in (first, *rest)]

    (own, *rest), (lacking, *_) = run_ranks(2, train)
    assert lacking is None
    torch.testing.assert_close(own, torch.full_like(own, 1.9))
    for value in rest:
        torch.testing.assert_close(value, torch.full_like(value, 1.5 * 1.9))


def test_a_resumed_run_goes_on_bit_for_bit() -> None:
    def train(world: World) -> None:
        whole, parted = build_model("dense"), build_model("dense")
        first = STREAMING.optimizer(whole, world, state="average")
        steps_of(whole, first, range(7))
        second = STREAMING.optimizer(parted, world, state="average")
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        for model, optimizer in ((whole, first), (parted, second)):
            steps_of(model, optimizer, range(7, 14))
            optimizer.close()
        for name, value in whole.state_dict().items():
            assert torch.equal(parted.state_dict()[name], value), name

    run_ranks(2, train)


def test_other_choices_and_other_ranks_are_refused() -> None:
    def build(world: World) -> None:
        model: Any = build_model("dense")
        with raises(ConfigError, "unknown-choice", "state"):
            STREAMING.optimizer(model, world, state="mean")
        with raises(MismatchError, "ranks-built-differently", "state"):
            STREAMING.optimizer(model, world, state="average" if world.rank else "keep")

    run_ranks(2, build)


@pytest.mark.parametrize("size", [1, 3])
def test_half_precision_is_averaged_in_fp32(size: int) -> None:
    def train(world: World) -> list[Tensor]:
        model = torch.nn.Linear(3, 2).bfloat16()
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = LocalOptimizer.average(inner, model, sync_every=1, state="average", world=world)
        for param in model.parameters():
            param.grad = torch.full_like(param, 1.0 + world.rank)
        optimizer.step()
        optimizer.close()
        return [inner.state[param]["momentum_buffer"] for param in model.parameters()]

    for found in run_ranks(size, train):
        for value in found:
            assert value.dtype == torch.bfloat16
            assert torch.equal(value, torch.full_like(value, (1.0 + size) / 2))
