"""Over MPI: communication behind layers that sleep costs nothing until there is more of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from dearmpi import DistributedOptimizer
from dearmpi.comm.api.collectives import Buffer, Collectives, Request
from dearmpi.comm.backends import mpi
from dearmpi.comm.world import World
from dearmpi.config import ReduceScatter
from tests.unit.engine.chain import Chain

NUM_LAYERS = 4
# Of a layer. A busy machine holds up what is longer by a smaller share of it.
PACES_S = (0.02, 0.06, 0.2)
_NUM_TRIES = 12  # on a busy machine most are disturbed

pytestmark = pytest.mark.ranks(at_least=2)


@dataclass(slots=True)
class Wire:
    """This rank's link, which carries one operation at a time, each for ``seconds``."""

    seconds: float = 0.0
    free_s: float = 0.0
    num_carried: int = 0

    def book(self) -> float:
        """When an operation that starts now will have passed."""
        self.num_carried += 1
        self.free_s = max(self.free_s, time.perf_counter()) + self.seconds
        return self.free_s


@dataclass(slots=True)
class LateRequest(Request):
    """A request that is complete once MPI says so and it has passed the wire."""

    request: Request
    due_s: float

    def test(self) -> bool:
        """Drive MPI in any case."""
        return self.request.test() and time.perf_counter() >= self.due_s


@dataclass(slots=True)
class SlowCollectives:
    """Collectives over MPI whose reduce-scatters and all-gathers on channels take longer."""

    real: Collectives
    wire: Wire
    is_channel: bool = False
    held: list[object] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def start_reduce_scatter(
        self, buffer: Buffer, algorithm: ReduceScatter, **options: Any
    ) -> Request:
        return self._delay(self.real.start_reduce_scatter(buffer, algorithm, **options))

    def start_all_gather(
        self, buffer: Buffer, algorithm: ReduceScatter = "native", **options: Any
    ) -> Request:
        return self._delay(self.real.start_all_gather(buffer, algorithm, **options))

    def start_duplicate(self) -> tuple[Any, Request]:
        twin, request = self.real.start_duplicate()
        return SlowCollectives(twin, self.wire, is_channel=True), request

    def _delay(self, request: Request) -> Request:
        return LateRequest(request, self.wire.book()) if self.is_channel else request


@pytest.fixture(scope="module")
def wire() -> Wire:
    return Wire()


@pytest.fixture(scope="module")
def slow_world(wire: Wire, world: World) -> Iterator[World]:
    """A second world over the same ranks, with ``wire`` between them."""
    collectives: Any = SlowCollectives(mpi.connect(), wire)
    slow = World(collectives, progress=world.progress.mode)
    yield slow
    slow.barrier()
    slow.close()


Iterate = Callable[..., float]


@pytest.fixture
def iteration_s(slow_world: World, wire: Wire) -> Iterate:
    """Seconds of the best of a few iterations, on the slowest rank; all ranks have the same."""

    def measure(layer_s: float, operation_s: float, **settings: Any) -> float:
        model = Chain(NUM_LAYERS, lambda _: time.sleep(layer_s))
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model,
            world=slow_world,
            bucket_cap_mb=1e-6,
            **settings,
        )
        wire.seconds, before = operation_s, wire.num_carried
        times = []
        first_s = time.perf_counter()
        for _ in range(_NUM_TRIES):
            slow_world.barrier()
            start = time.perf_counter()
            model.backward()
            optimizer.step()
            times.append(time.perf_counter() - start)
        # One iteration alone may be shorter than its network time, after one that was disturbed:
        # the wire went on meanwhile. All but the last have passed it when the last one ends.
        passed_s = (_NUM_TRIES - 1) * 2 * NUM_LAYERS * operation_s
        assert time.perf_counter() - first_s >= passed_s
        optimizer.close()
        wire.seconds = 0.0
        assert wire.num_carried - before == _NUM_TRIES * 2 * NUM_LAYERS
        return slow_world.all_reduce([min(times[2:])], "max")[0]

    return measure


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_dear_hides_what_serial_exposes(gather: str, iteration_s: Iterate) -> None:
    """Equal computation, equal communication: all that differs is what is exposed."""

    def is_hidden(layer_s: float) -> bool:
        operation_s, compute_s = 0.6 * layer_s, 2 * NUM_LAYERS * layer_s
        exposed_s = {
            schedule: iteration_s(layer_s, operation_s, schedule=schedule, gather=gather)
            - compute_s
            for schedule in ("dear", "wfbp", "serial")
        }
        assert exposed_s["serial"] > 7 * operation_s
        # Expected of dear: the first layers' reduce-scatter and all-gather, of 8 operations 2.
        return exposed_s["dear"] < min(0.6 * exposed_s["serial"], exposed_s["wfbp"])

    assert any(map(is_hidden, PACES_S))


def test_communication_longer_than_computation_costs_the_excess(iteration_s: Iterate) -> None:

    def is_the_excess(layer_s: float) -> bool:
        operation_s = 1.5 * layer_s
        dear_s = iteration_s(layer_s, operation_s, schedule="dear")
        network_s, compute_s = 2 * NUM_LAYERS * operation_s, 2 * NUM_LAYERS * layer_s
        return dear_s < 0.9 * (network_s + compute_s)  # computation hides behind the network

    assert any(map(is_the_excess, PACES_S))
