"""Channel: a queue for one kind of operation, apart from all other kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dearmpi.comm.api.collectives import Chain, Collectives, Completed, Request
from dearmpi.comm.messages.collective_calls import gather_texts
from dearmpi.comm.progress.lane import Lane, Observer, Operation, Work
from dearmpi.comm.progress.progress import Progress


class Channel:
    """A communicator of its own, with the lane that posts its operations in order."""

    def __init__(self, collectives: Collectives, lane: Lane, progress: Progress) -> None:
        self.collectives = collectives
        self._lane = lane
        self._progress = progress

    def observe(self, observer: Observer) -> None:
        """Have ``observer`` see all operations from now on."""
        self._lane.observer = observer

    def submit_operation(self, operation: Operation) -> None:
        """Queue ``operation``, which posts itself on ``collectives``."""
        self._progress.submit(self._lane, operation)

    def submit(
        self,
        label: str,
        start: Callable[[Collectives], Request],
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        """Queue an operation; ``finish`` runs on the progress thread once it is complete."""
        self._progress.submit(self._lane, Work(label, lambda: start(self.collectives), finish))

    def run(self, label: str, start: Callable[[Collectives], Request]) -> None:
        """Queue an operation and wait for it."""
        self.begin(label, start)()

    def begin(
        self,
        label: str,
        start: Callable[[Collectives], Request],
        finish: Callable[[], None] = lambda: None,
    ) -> Callable[[], None]:
        """As ``submit``; returns a function that waits until ``finish`` has run."""
        done: list[bool] = []

        def end() -> None:
            finish()
            done.append(True)

        self.submit(label, start, end)
        return lambda: self._progress.wait_until(lambda: bool(done), what=label)

    def all_gather_text(self, label: str, text: str) -> list[str]:
        """Every rank's text, by rank (collective)."""
        texts: list[str] = []

        def follow(collectives: Collectives) -> Iterator[Request]:
            texts.extend((yield from gather_texts(collectives, text)))

        self.run(label, lambda collectives: Chain(follow(collectives)))
        return texts

    def resize(self, window: int) -> None:
        """Allow ``window`` operations in flight, those already posted included."""
        self._lane.window = window

    def close(self) -> None:
        """Wait for queued operations, then release lane and communicator (collective)."""
        lane = self._lane
        self._progress.wait_until(lambda: not lane.busy, what=f"the {lane.name} lane to empty")
        self.run(f"release of {lane.name}", _free)
        self._progress.close_lane(lane)


def _free(collectives: Collectives) -> Request:
    collectives.free()
    return Completed()
