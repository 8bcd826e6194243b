"""Failures of a device: told with rank, host and device, and apart from those of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.errors import CommError
from tests.fakes import FakeCollectives, FakeHub
from tests.fakes.ranks import run_ranks
from tests.lazy_device import AcceleratorError, LazyDevice, put_on
from tests.unit.engine.chain import Chain

SIZE = 2


class Failing(torch.optim.SGD):
    """An optimizer to which something happens once it trains in earnest."""

    error: Exception | None = None

    def step(self, closure: Any = None) -> Any:
        if self.error is not None:
            raise type(self.error)(*self.error.args)
        return super().step(closure)


def train(world: World, error: Exception | None = None) -> None:
    """Three steps, with ``error`` in the first update."""
    model = Chain(2)
    inner = Failing(model.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(inner, model, world=world, bucket_cap_mb=1e-6)
    for update in optimizer._built.updates.of_buckets:
        update._optimizer.error = error  # type: ignore[attr-defined]
    for _ in range(3):
        model.backward()
        optimizer.step()
    optimizer.close()


def test_a_device_that_is_lost_is_named_with_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    put_on(monkeypatch, LazyDevice(fails_at=3))
    with pytest.raises(CommError) as error:
        run_ranks(SIZE, train, hub=FakeHub(SIZE, hosts=["n0", "n1"]))
    text = str(error.value)
    assert (
        "rank " in text and "lazy:0 (stand-in) failed: CUDA error" in text and "nvidia-smi" in text
    )


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("Tried to allocate 2.00 GiB"), "is out of memory: .* 2.00 GiB"),
        (AcceleratorError("CUDA error: gone\nadvice"), "failed: CUDA error: gone;"),
    ],
)
def test_a_device_that_fails_in_an_update_is_named(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_on(monkeypatch, LazyDevice())
    named = rf"rank . on fakehost: update of bucket . .*lazy:0 \(stand-in\) {said}"
    with pytest.raises(CommError, match=named):
        run_ranks(SIZE, lambda world: train(world, error))


@pytest.mark.parametrize("where", ["MPI", "optimizer"])
def test_what_fails_beside_the_device_is_not_blamed_on_it(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What mpi4py raises, or an optimizer, is a RuntimeError as well."""
    put_on(monkeypatch, LazyDevice())
    error = RuntimeError(f"injected into {where}")

    def refuse(*_: Any, **__: Any) -> None:
        raise error

    if where == "MPI":
        monkeypatch.setattr(FakeCollectives, "start_reduce_scatter", refuse)
    with pytest.raises(CommError, match=f"injected into {where}") as raised:
        run_ranks(SIZE, lambda world: train(world, error if where == "optimizer" else None))
    assert "lazy:0" not in str(raised.value).partition("\n")[0]
