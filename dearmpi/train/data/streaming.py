"""Streaming: training data without a length, which every rank reads in the same order.

A step takes the next ``batch_size`` samples; of these each rank, and each process that loads for
it, keeps its own. So all know when the data ends, and the result is that of one process. The
position is the number of passes and of steps in this pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from dearmpi.errors import DataError, DearError
from dearmpi.train.data.data import MicroBatch, RankShares, check_shares, divide
from dearmpi.train.tasks.task import Task, collate


@dataclass(slots=True)
class StreamBatches:
    """The share of one rank in every step of a stream. Sizes as in ``Batches``.

    epoch, first_step: of the pass under way; the step with which it began.
    count: samples of the last step, over all ranks.
    """

    batch_size: int
    world_size: int
    rank: int
    micro_batches: int = 1
    shares: RankShares = field(default_factory=RankShares)
    epoch: int = 0
    first_step: int = 0
    count: int = 0
    steps_per_epoch: int = field(default=0, init=False)  # nobody knows
    num_samples: None = field(default=None, init=False)
    _first_before: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        check_shares(self.batch_size, self.world_size, self.rank, self.micro_batches)
        self.shares.check(self.batch_size, self.world_size, self.micro_batches)

    def position(self, step: int) -> tuple[int, int]:
        """Pass and step within it of step number ``step``, which is not far back."""
        if step < self.first_step:
            return self.epoch - 1, step - self._first_before
        return self.epoch, step - self.first_step

    def begin_pass(self, step: int) -> None:
        """The next pass begins with ``step``."""
        self.epoch, self._first_before, self.first_step = self.epoch + 1, self.first_step, step

    def parts(self, count: int, weights: tuple[float, ...] | None = None) -> tuple[MicroBatch, ...]:
        """This rank's micro-batches of a step of ``count`` samples, by their place in it.

        weights: of the ranks, instead of those that count now.
        """
        shares = self.shares if weights is None else RankShares(weights)
        first, last = shares.range_of(count, self.world_size, self.rank, self.micro_batches)
        return divide(
            range(first, last),
            count=count,
            world_size=self.world_size,
            micro_batches=self.micro_batches,
        )

    def samples_of(self, step: int) -> int:
        """Samples of the last step."""
        return self.count


@dataclass(frozen=True, slots=True)
class StreamBatch:
    """A micro-batch of a stream, on the host; None if it is empty. count: samples of its step."""

    count: int
    batch: Any


class StreamReader:
    """Reads ``data`` step by step, as the training data of a task. Each process has its own."""

    def __init__(self, data: Iterable[Any], batches: StreamBatches) -> None:
        self._data, self._batches = data, batches
        self._iterator: Iterator[Any] | None = None
        self._next = (-1, 0)  # pass and step that are read next
        self._samples: list[Any] = []  # of the step before
        self._state: tuple[tuple[int, int], Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_iterator": None, "_next": (-1, 0), "_samples": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def load(
        self, task: Task, epoch: int, step: int, number: int, weights: tuple[float, ...] = ()
    ) -> StreamBatch:
        """Micro-batch ``number`` of this rank; steps come in rising order. Raises DataError for
        samples that cannot be read or make no batch.

        weights: of the ranks, by which they share the step's samples; none of them: evenly.
        """
        samples = self._read(task, epoch, step)
        indices = self._batches.parts(len(samples), weights)[number].indices
        if not indices:
            return StreamBatch(len(samples), None)
        try:
            return StreamBatch(len(samples), collate(task, [samples[i] for i in indices]))
        except DearError:
            raise
        except Exception as error:
            raise DataError(
                f"task {task.name}: samples of step {step} in epoch {epoch} do not make a batch: "
                f"{type(error).__name__}: {error}; give the task a collate function that fits them",
                code="sample-unreadable",
            ) from error

    def resume(self, epoch: int, step: int, state: Any) -> None:
        """The next samples are those of ``step``, of which the data has given this ``state``."""
        self._state = ((epoch, step), state)

    def state(self, epoch: int, step: int) -> Any:
        """The data's own state before ``step``. None where it has none, or is at its beginning, or
        where other processes read it.
        """
        data: Any = self._data
        has_state = hasattr(data, "state_dict") and hasattr(data, "load_state_dict")
        if not has_state or self._next != (epoch, step) or step == 0:
            return None
        return deepcopy(data.state_dict())  # which may be its living state

    def _read(self, task: Task, epoch: int, step: int) -> list[Any]:
        """All samples of the step: fewer at the end of a pass, and none after it."""
        if self._next == (epoch, step + 1):
            return self._samples
        try:
            if self._iterator is None or self._next[0] != epoch or self._next[1] > step:
                self._begin(epoch, step)
            assert self._iterator is not None
            size = self._batches.batch_size
            behind = (step - self._next[1]) * size
            for _ in islice(self._iterator, behind):
                pass
            self._samples = list(islice(self._iterator, size))
        except Exception as error:
            raise DataError(
                f"task {task.name}: the training data cannot be read at step {step} of epoch "
                f"{epoch}: {type(error).__name__}: {error}",
                code="sample-unreadable",
            ) from error
        self._next = (epoch, step + 1)
        return self._samples

    def _begin(self, epoch: int, step: int) -> None:
        """Begin the pass, at ``step`` where the data can be put there, else at its first."""
        data: Any = self._data
        if hasattr(data, "set_epoch"):
            data.set_epoch(epoch)
        self._next = (epoch, 0)
        if self._state is not None and self._state[0] == (epoch, step):
            data.load_state_dict(self._state[1])
            self._next = (epoch, step)
        self._iterator = iter(data)
