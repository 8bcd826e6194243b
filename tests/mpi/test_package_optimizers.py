"""Optimizers of a package, and several in one model: each trains as one process does, in shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.errors import ConfigError
from tests.codes import raises

NUM_STEPS, BATCH_SIZE, WIDTH = 6, 16, 6
Make = Callable[[Sequence[Any]], Optimizer]


def build() -> nn.Module:
    """Square layers and more samples than their width: a gradient without full rank has bases of
    eigenvectors that rounding chooses.
    """
    torch.manual_seed(3)
    layers = (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(*layers).double()


def package(name: str, **options: Any) -> Make:
    def make(params: Sequence[Any]) -> Optimizer:
        pytest.importorskip("pytorch_optimizer", reason="an extra of the tests")
        import pytorch_optimizer

        made: Optimizer = getattr(pytorch_optimizer, name)(params, **options)
        return made

    return make


def train(makes: Sequence[Make], world: World | None = None) -> tuple[list[Tensor], set[str]]:
    """The parameters at the end, and how the optimizers' state is kept. With two optimizers the
    first has the matrices.
    """
    model = build()
    params = list(model.parameters())
    parts: list[Sequence[Any]] = [params]
    if len(makes) == 2:
        parts = [[p for p in params if (p.dim() == 2) is is_matrix] for is_matrix in (True, False)]
    optimizers: list[Any] = [make(part) for make, part in zip(makes, parts, strict=True)]
    share, weight = slice(None), 1.0
    if world is not None:
        optimizers = [DistributedOptimizer(one, model, world=world) for one in optimizers]
        own = world.batch_share(BATCH_SIZE, [2.0 + rank for rank in range(world.size)])
        share, weight = slice(own.start, own.stop), own.weight
    for one in optimizers:
        getattr(one, "train", lambda: None)()
    generator = torch.Generator().manual_seed(5)
    for _ in range(NUM_STEPS):
        inputs = torch.randn(BATCH_SIZE, WIDTH, generator=generator, dtype=torch.float64)
        targets = inputs.roll(1, 1).sin()
        for one in optimizers:
            one.zero_grad()
        loss = nn.functional.mse_loss(model(inputs[share]), targets[share])
        torch.autograd.backward(weight * loss)
        for one in optimizers:
            one.step()
    kinds: set[str] = set()
    for one in optimizers:
        getattr(one, "eval", lambda: None)()
        if world is not None:
            kinds |= kinds_of(one.local_state(), world)
            one.synchronize()
    found = [param.detach().clone() for param in params]
    for one in optimizers if world is not None else ():
        one.close()
    return found, kinds


def kinds_of(local: Any, world: World) -> set[str]:
    """``owners``, ``elements`` or ``replicas``, over all ranks."""
    named = (("owners", local.owned), ("elements", local.pieces), ("replicas", local.whole))
    own = " ".join(kind for kind, kept in named if kept)
    return set(" ".join(world.all_gather_text(own)).split())


CASES: dict[str, tuple[tuple[Make, ...], set[str]]] = {
    "soap": ((package("SOAP", lr=0.01),), {"owners"}),
    "shampoo": ((package("Shampoo", lr=0.01),), {"owners"}),
    "lamb": ((package("Lamb", lr=0.01),), {"owners"}),
    "lion": ((package("Lion", lr=0.001),), {"elements"}),
    "schedule-free": ((package("ScheduleFreeAdamW", lr=0.01),), {"elements"}),
    "adafactor": ((lambda params: torch.optim.Adafactor(params, lr=0.01),), {"owners"}),
    "two": (
        (
            lambda params: torch.optim.Muon(params, lr=0.01),
            lambda params: torch.optim.AdamW(params, lr=0.01),
        ),
        {"owners", "elements"},
    ),
    "two-of-package": (
        (package("SOAP", lr=0.01), package("Lion", lr=0.001)),
        {"owners", "elements"},
    ),
}


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("name", CASES)
def test_training_equals_one_process_and_state_is_sharded(world: World, name: str) -> None:
    if name == "two" and not hasattr(torch.optim, "Muon"):
        pytest.skip(f"torch {torch.__version__} has no Muon; torch 2.9 and newer have")
    makes, kinds = CASES[name]
    found, kept = train(makes, world)
    expected, _ = train(makes)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert kept == kinds


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("name", ["soap", "shampoo", "lamb", "adafactor"])
def test_the_state_of_owners_goes_on_in_the_plain_optimizer(world: World, name: str) -> None:
    """On one process, by ``state_dict()``, as that of ranks that go on together."""
    (make,), _ = CASES[name]
    model, alone = build(), build()
    optimizer = DistributedOptimizer(make(list(model.parameters())), model, world=world)
    share = world.batch_share(BATCH_SIZE)
    generator = torch.Generator().manual_seed(7)
    plain: Optimizer | None = None
    for step in range(2 * NUM_STEPS):
        if step == NUM_STEPS:
            optimizer.synchronize()
            alone.load_state_dict(model.state_dict())
            plain = make(list(alone.parameters()))
            plain.load_state_dict(optimizer.state_dict())
        inputs = torch.randn(BATCH_SIZE, WIDTH, generator=generator, dtype=torch.float64)
        targets = inputs.roll(1, 1).sin()
        optimizer.zero_grad()
        part = slice(share.start, share.stop)
        loss = nn.functional.mse_loss(model(inputs[part]), targets[part])
        torch.autograd.backward(share.weight * loss)
        optimizer.step()
        if plain is not None:
            plain.zero_grad()
            torch.autograd.backward(nn.functional.mse_loss(alone(inputs), targets))
            plain.step()
    optimizer.synchronize()
    found, expected = dict(model.named_parameters()), dict(alone.named_parameters())
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-10, atol=1e-12)
    optimizer.close()


@pytest.mark.parametrize(
    ("name", "code"), [("Prodigy", "optimizer-couples-buckets"), ("SophiaH", "trial-step-failed")]
)
def test_an_optimizer_that_needs_all_parameters_at_once_is_refused(
    world: World, name: str, code: str
) -> None:
    model = build()
    optimizer = package(name)(list(model.parameters()))
    with raises(ConfigError, code, name):
        DistributedOptimizer(optimizer, model, world=world)
