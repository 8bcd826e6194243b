"""Which samples each rank uses in each optimizer step, as a pure function of the position.

An epoch's order is a permutation drawn from the seed and the epoch alone, so it is the same at
every world size: a run stopped at (epoch, step) goes on with the same samples on any number of
ranks. The position is all the state there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dearmpi.batch_shares import check_sizes, check_weights, share_range
from dearmpi.errors import ConfigError, DataError, DearError
from dearmpi.train.tasks.task import Samples, Task, collate


def cut(count: int, num_parts: int, part: int) -> tuple[int, int]:
    """First and one-past-last item of ``part`` when ``count`` items are cut into contiguous
    parts whose sizes differ by at most one.
    """
    return count * part // num_parts, count * (part + 1) // num_parts


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples of one forward and backward on one rank.

    indices: positions in the data set; empty only where a last partial batch leaves none.
    weight: factor on the mean loss of these samples. Summed over a rank's micro-batches and
        averaged over ranks, the weighted losses are the mean loss over all samples of the step.
    """

    indices: tuple[int, ...]
    weight: float


@dataclass(slots=True)
class EpochOrder:
    """Order of the samples in any epoch. Keeps the order of the last epoch, since drawing it takes
    a pass over the data set's length.
    """

    num_samples: int
    seed: int
    shuffle: bool
    _epoch: int = field(default=-1, init=False, compare=False, repr=False)
    _order: NDArray[np.int32] | NDArray[np.int64] | None = field(
        default=None, init=False, compare=False, repr=False
    )

    def samples(self, epoch: int, begin: int, end: int) -> tuple[int, ...]:
        """Data set positions of places ``begin`` to ``end`` of the epoch's order."""
        if not self.shuffle:
            return tuple(range(begin, end))
        if self._order is None or self._epoch != epoch:
            order: NDArray[np.int32] | NDArray[np.int64]
            # Four bytes each where they suffice: a hundred million samples are then 400 MB.
            if self.num_samples < 2**31:
                order = np.arange(self.num_samples, dtype=np.int32)
            else:
                order = np.arange(self.num_samples, dtype=np.int64)
            np.random.Generator(np.random.PCG64([self.seed, epoch])).shuffle(order)
            self._order, self._epoch = order, epoch
        return tuple(self._order[begin:end].tolist())


def check_shares(batch_size: int, world_size: int, rank: int, micro_batches: int) -> None:
    """Raise ConfigError for sizes below 1, a ``rank`` that does not exist, and a full batch that
    would leave some micro-batch of some rank empty.
    """
    sizes = {"batch_size": batch_size, "world_size": world_size, "micro_batches": micro_batches}
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{name} is {size}; it must be at least 1", code="out-of-range")
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"rank is {rank}; with world size {world_size} it must be 0 to {world_size - 1}",
            code="out-of-range",
        )
    least = world_size * micro_batches
    if batch_size < least:
        raise ConfigError(
            f"batch_size is {batch_size}, over all ranks, but {world_size} ranks x "
            f"{micro_batches} micro-batches need at least {least} samples; raise it, or use fewer "
            "ranks or micro-batches",
            code="batch-too-small",
        )


@dataclass(slots=True)
class RankShares:
    """How a step's samples are divided among ranks; between steps it may change.

    weights: by rank; none of them: evenly.
    """

    weights: tuple[float, ...] = ()

    def check(self, batch_size: int, world_size: int, micro_batches: int) -> None:
        """Raise ConfigError unless each micro-batch of each rank has samples in a full batch."""
        if self.weights:
            check_weights(self.weights, world_size, name="batch_shares")
            check_sizes(batch_size, self.weights, least=micro_batches, name="batch_shares")

    def range_of(
        self, count: int, world_size: int, rank: int, micro_batches: int
    ) -> tuple[int, int]:
        """First and one-past-last of the samples of ``rank``, of ``count``."""
        if not self.weights:
            return cut(count, world_size, rank)
        return share_range(count, self.weights, rank, least=micro_batches)

    def sizes(self, count: int, world_size: int, micro_batches: int) -> tuple[int, ...]:
        """Samples by rank, of ``count``."""
        ranges = (self.range_of(count, world_size, r, micro_batches) for r in range(world_size))
        return tuple(last - first for first, last in ranges)


def divide(
    mine: Sequence[int], *, count: int, world_size: int, micro_batches: int
) -> tuple[MicroBatch, ...]:
    """A rank's samples ``mine``, of the ``count`` of a step, as ``micro_batches`` micro-batches."""
    pieces = (cut(len(mine), micro_batches, i) for i in range(micro_batches))
    return tuple(
        MicroBatch(indices=tuple(mine[a:b]), weight=(b - a) * world_size / max(1, count))
        for a, b in pieces
    )


@dataclass(frozen=True, slots=True)
class Batches:
    """The share of one rank in every step of every epoch.

    num_samples: length of the data set; every sample is used exactly once per epoch.
    batch_size: samples per optimizer step over all ranks and all micro-batches. The last batch
        of an epoch holds what is left.
    micro_batches: forward and backward passes whose gradients are accumulated into one step.
    shuffle: a new order each epoch, from ``seed`` and the epoch; else the data set's own.
    shares: how many of a step's samples each rank has; which samples a step has does not change.

    Raises ConfigError where a full batch would leave some micro-batch of some rank empty, and
    DataError where there are fewer samples than ranks.
    """

    num_samples: int
    batch_size: int
    world_size: int
    rank: int
    micro_batches: int = 1
    seed: int = 0
    shuffle: bool = True
    shares: RankShares = field(default_factory=RankShares)
    _order: EpochOrder = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_shares(self.batch_size, self.world_size, self.rank, self.micro_batches)
        self.shares.check(self.batch_size, self.world_size, self.micro_batches)
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}; it must be 0 or more", code="out-of-range")
        if self.num_samples < self.world_size:
            raise DataError(
                f"{self.num_samples} training samples are too few for {self.world_size} ranks; "
                f"use at most {self.num_samples} ranks, or more data",
                code="data-insufficient",
            )
        order = EpochOrder(self.num_samples, self.seed, self.shuffle)
        object.__setattr__(self, "_order", order)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch, the last partial one included."""
        return -(-self.num_samples // self.batch_size)

    def position(self, step: int) -> tuple[int, int]:
        """Epoch and step within it of step number ``step``, from 0."""
        return divmod(step, self.steps_per_epoch)

    def samples_of(self, step: int) -> int:
        """Samples of step number ``step``, over all ranks."""
        begin = self.position(step)[1] * self.batch_size
        return min(self.batch_size, self.num_samples - begin)

    def last_passes(self) -> list[int]:
        """Micro-batches that are not empty in the last step of an epoch, by rank."""
        count = self.num_samples - (self.steps_per_epoch - 1) * self.batch_size
        sizes = self.shares.sizes(count, self.world_size, self.micro_batches)
        return [min(self.micro_batches, size) for size in sizes]

    def step(self, epoch: int, step_in_epoch: int) -> tuple[MicroBatch, ...]:
        """This rank's micro-batches of one step, ``micro_batches`` of them.

        Raises ConfigError where there is no such step.
        """
        if epoch < 0 or not 0 <= step_in_epoch < self.steps_per_epoch:
            raise ConfigError(
                f"there is no step {step_in_epoch} in epoch {epoch}: steps are "
                f"0 to {self.steps_per_epoch - 1}, epochs from 0",
                code="out-of-range",
            )
        begin = step_in_epoch * self.batch_size
        count = min(self.batch_size, self.num_samples - begin)
        first, last = self.shares.range_of(count, self.world_size, self.rank, self.micro_batches)
        mine = self._order.samples(epoch, begin + first, begin + last)
        return divide(
            mine, count=count, world_size=self.world_size, micro_batches=self.micro_batches
        )


@dataclass(frozen=True, slots=True)
class StepSampler:
    """A rank's samples of each step, as the ``batch_sampler`` of a torch DataLoader.

    It begins at the step that ``position`` returns, and ends at ``num_steps``. The last, partial
    batch of an epoch is left out.
    """

    batches: Batches
    num_steps: int
    position: Callable[[], int]

    def epoch(self, step: int) -> int:
        """The epoch of step number ``step``, from 0."""
        return step // self._steps_per_epoch

    def weight(self, num_samples: int) -> float:
        """By what to multiply the mean loss of ``num_samples`` samples, this rank's of a step: the
        average over ranks is then the mean over the step's samples.
        """
        return num_samples * self.batches.world_size / self.batches.batch_size

    def __len__(self) -> int:
        return max(0, self.num_steps - self.position())

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.position(), self.num_steps):
            (share,) = self.batches.step(*divmod(step, self._steps_per_epoch))
            yield list(share.indices)

    @property
    def _steps_per_epoch(self) -> int:
        return self.batches.num_samples // self.batches.batch_size


def evaluation_shares(
    num_samples: int, batch_size: int, *, world_size: int, rank: int
) -> Iterator[tuple[int, ...]]:
    """This rank's samples of an evaluation, at most ``batch_size`` at a time.

    Over all ranks each sample comes once, in no need of equal shares: a rank may have one sample
    more than another, or none where there are fewer samples than ranks.
    """
    first, last = cut(num_samples, world_size, rank)
    for begin in range(first, last, batch_size):
        yield tuple(range(begin, min(begin + batch_size, last)))


def load_batch(task: Task, data: Samples, indices: tuple[int, ...]) -> Any:
    """Read the samples at ``indices`` of ``data`` and collate them to a batch of ``task``.

    Raises DataError naming the sample that could not be read, or the samples that do not make
    a batch together.
    """
    samples = []
    for index in indices:
        try:
            samples.append(data[index])
        except DearError:
            raise
        except Exception as error:
            raise DataError(
                f"task {task.name}: sample {index} of {len(data)} cannot be read: "
                f"{type(error).__name__}: {error}",
                code="sample-unreadable",
            ) from error
    try:
        return collate(task, samples)
    except DearError:
        raise
    except Exception as error:
        raise DataError(
            f"task {task.name}: samples {_abbreviate(indices)} do not make a batch: "
            f"{type(error).__name__}: {error}; give the task a collate function that fits them",
            code="sample-unreadable",
        ) from error


def _abbreviate(indices: tuple[int, ...], limit: int = 8) -> str:
    shown = ", ".join(str(index) for index in indices[:limit])
    return shown if len(indices) <= limit else f"{shown}, ... ({len(indices)} in all)"
