"""A stage: ranks on a clock that the test moves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dearmpi.comm.world import World
from tests.fakes import FakeClock, FakeHub
from tests.fakes.ranks import run_ranks
from tests.unit.engine.chain import name_of_bucket

PATIENCE_S = 60.0  # reached only by what hangs


def wait_for(ready: Callable[[], bool], what: str) -> None:
    deadline = time.perf_counter() + PATIENCE_S
    while not ready():
        assert time.perf_counter() < deadline, f"{what} did not happen"
        time.sleep(0.001)


class Stage:
    """Two ranks of a ``Chain``, a network on which every operation on the bucket of a layer takes a
    second, and a clock that stands still.

    ``log`` says at what time which rank did what.
    """

    def __init__(self, num_layers: int) -> None:
        self.clock = FakeClock()
        self.num_layers = num_layers
        self.hub = FakeHub(
            2,
            name=name_of_bucket(2, num_layers),
            clock=self.clock.now,
            seconds=lambda label, nbytes: float(label[-1:].isdigit()),
        )
        self.log: dict[tuple[int, str], float] = {}

    def note(self, rank: int, what: str) -> None:
        self.log[rank, what] = self.clock.now()

    def has_happened(self, what: str) -> bool:
        return all((rank, what) in self.log for rank in range(2))

    def await_moment(self, what: str) -> None:
        wait_for(lambda: self.has_happened(what), what)

    def finish(self, label: str) -> None:
        """Let time pass until operation ``label`` is complete."""
        wait_for(lambda: label in {span.label for span in list(self.hub.carried)}, label)
        stop_s = next(span.stop_s for span in self.hub.carried if span.label == label)
        self.clock.advance(stop_s - self.clock.now())

    @contextmanager
    def running(self, function: Callable[[World], None]) -> Iterator[None]:
        """Run ``function`` on both ranks, beside the test and until its end."""
        errors: list[BaseException] = []

        def run() -> None:
            try:
                run_ranks(2, function, hub=self.hub)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield
            thread.join(PATIENCE_S)
        finally:
            self.hub.fail("the test is over")
            thread.join(PATIENCE_S)
        assert not errors, errors
