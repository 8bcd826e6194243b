"""Registry: all algorithms by name, the collectives of a library that carry them out, and the
algorithm that is fastest in trials. ``NativeAlgorithm`` is the library's own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import ClassVar, get_args

from dearmpi.comm.algorithms.algorithm import Algorithm, MessagePassing
from dearmpi.comm.algorithms.exchange import ExchangeAlgorithm, RotatedExchange
from dearmpi.comm.algorithms.grid_collectives import GridAlgorithm, choose_grid
from dearmpi.comm.algorithms.ring import RingAlgorithm, RingContext, contexts_on
from dearmpi.comm.algorithms.scratch import (
    Scratch,
    ScratchRequest,
    carrier_of,
    copy,
    sent_size,
)
from dearmpi.comm.api.collectives import (
    Buffer,
    Collectives,
    Completed,
    Request,
    shards_of_buffer,
)
from dearmpi.comm.progress.channel import Channel
from dearmpi.comm.world import World, Wrap, unchanged
from dearmpi.config import ADDED_BY_LIBRARY, EngineConfig, ReduceScatter, WireDtype
from dearmpi.cuts import Cuts
from dearmpi.grid import Buffers, Grid, GridGain, carried


class NativeAlgorithm:
    """``Algorithm`` by one operation of the library each way."""

    all_gather: ClassVar[ReduceScatter] = "native"

    def __init__(self, transport: MessagePassing) -> None:
        self._transport = transport

    def start_reduce_scatter(self, buffer: Buffer, cuts: Cuts, *, carrier: Buffer) -> Request:
        """Sum into scratch memory of a shard, which is then copied to the shard.

        Raises ConfigError if the library cannot add elements of the dtype of ``carrier``.
        """
        transport = self._transport
        transport.check_addable(carrier)
        numel = cuts.size_of(transport.rank)
        held = transport.scratch.take(buffer, numel)
        total = held[:numel]
        finish = partial(copy, total, into=buffer[cuts.slice_of(transport.rank)])
        request = transport.start_library_reduce_scatter(buffer, total, cuts)
        return ScratchRequest(transport.scratch, request, held=[held], finish=finish)

    def start_all_gather(self, buffer: Buffer, cuts: Cuts) -> Request:
        """In place, without scratch memory."""
        return self._transport.start_library_all_gather(buffer, cuts)


ALGORITHMS: dict[ReduceScatter, type[Algorithm]] = {
    "native": NativeAlgorithm,
    "ring": RingAlgorithm,
    "exchange": ExchangeAlgorithm,
}

Operation = Callable[[Buffer, Collectives], Request]


@dataclass(frozen=True, slots=True)
class CollectiveAlgorithms:
    """How an optimizer reduces and gathers: an algorithm by name, and the dtype on the wire.

    wire_dtype: in what both operations send a wider buffer; None: as it is.
    grid: on which both go dimension by dimension; None: by ``reduce_scatter``, all ranks alike.
    grid_choice: what ``auto`` or a file has chosen that by, in words; empty for neither.
    scratch: memory that the codecs of all buckets share.
    The engine and all that measures for it start their collectives here.
    """

    reduce_scatter: ReduceScatter
    wire_dtype: WireDtype | None = None
    grid: Grid | None = None
    grid_choice: str = field(default="", compare=False)
    scratch: Scratch = field(default_factory=Scratch, compare=False, repr=False)

    @property
    def all_gather(self) -> ReduceScatter:
        """The algorithm of the all-gather that belongs to the reduce-scatter."""
        return ALGORITHMS[self.reduce_scatter].all_gather

    @property
    def can_reduce(self) -> bool:
        """False where the library would have to add half precision."""
        return self.wire_dtype is None or self.reduce_scatter not in ADDED_BY_LIBRARY

    @property
    def added_here(self) -> ReduceScatter:
        """The algorithm; a ring in the place of one by which the library adds."""
        return "ring" if self.reduce_scatter in ADDED_BY_LIBRARY else self.reduce_scatter

    def carrying(self, buffers: Buffers) -> list[CollectiveAlgorithms]:
        """These for each of ``buffers``, whose elements are as large as in memory."""
        if self.grid is None:
            return [self] * len(buffers)
        sent = [(cuts, sent_size(size, self.wire_dtype)) for cuts, size in buffers]
        return [replace(self, grid=grid) for grid in carried(self.grid, sent)]

    def start_reduce_scatter(
        self, buffer: Buffer, collectives: Collectives, cuts: Cuts | None = None
    ) -> Request:
        """Post the reduce-scatter of ``buffer``; ``cuts`` as in ``Collectives``."""
        return collectives.start_reduce_scatter(
            buffer, self.grid or self.reduce_scatter, wire_dtype=self.wire_dtype, cuts=cuts
        )

    def start_all_gather(
        self, buffer: Buffer, collectives: Collectives, cuts: Cuts | None = None
    ) -> Request:
        """Post the all-gather of ``buffer``; ``cuts`` as in ``Collectives``."""
        return collectives.start_all_gather(
            buffer, self.grid or self.all_gather, wire_dtype=self.wire_dtype, cuts=cuts
        )


class AlgorithmCollectives(MessagePassing):
    """What of ``Collectives`` is made of messages, on one communicator."""

    def start_reduce_scatter(
        self,
        buffer: Buffer,
        algorithm: ReduceScatter | Grid,
        *,
        wire_dtype: WireDtype | None = None,
        cuts: Cuts | None = None,
    ) -> Request:
        cuts = shards_of_buffer("reduce-scatter", buffer, self.size, cuts)
        if self.size == 1:
            return Completed()
        carrier = carrier_of(buffer, wire_dtype)
        return self._algorithm(algorithm).start_reduce_scatter(buffer, cuts, carrier=carrier)

    def start_all_gather(
        self,
        buffer: Buffer,
        algorithm: ReduceScatter | Grid = "native",
        *,
        wire_dtype: WireDtype | None = None,
        cuts: Cuts | None = None,
    ) -> Request:
        cuts = shards_of_buffer("all-gather", buffer, self.size, cuts)
        if self.size == 1:
            return Completed()
        start = self._algorithm(algorithm).start_all_gather
        carrier = carrier_of(buffer, wire_dtype)
        if carrier is buffer:
            return start(buffer, cuts)
        held = self.scratch.take(carrier, cuts.total)
        sent, own = held[: cuts.total], cuts.slice_of(self.rank)
        sent[own].copy_(buffer[own])
        # The own shard too, so that all ranks hold the same.
        finish = partial(copy, sent, into=buffer)
        return ScratchRequest(self.scratch, start(sent, cuts), held=[held], finish=finish)

    def start_exchange(self, sent: Buffer, arrived: Buffer, *, cuts: Cuts | None = None) -> Request:
        cuts = shards_of_buffer("exchange", sent, self.size, cuts)
        return RotatedExchange(self._next_context(), sent, arrived, cuts)

    @cached_property
    def _next_context(self) -> Callable[[], RingContext]:
        return contexts_on(self)

    def _algorithm(self, which: ReduceScatter | Grid) -> Algorithm | GridAlgorithm:
        if not isinstance(which, Grid):
            return self._algorithms[which]
        if which not in self._grids:
            self._grids[which] = GridAlgorithm(self, which)
        return self._grids[which]

    @cached_property
    def _grids(self) -> dict[Grid, GridAlgorithm]:
        return {}

    @cached_property
    def _algorithms(self) -> dict[ReduceScatter, Algorithm]:
        return {name: algorithm(self) for name, algorithm in ALGORITHMS.items()}


Start = Callable[[Collectives], Request]
_NUM_TRIALS = 3


def run_all(world: World, channel: Channel, starts: Sequence[Start]) -> float:
    """Start all of them together on every rank; the seconds until the last is complete here."""
    return run_together(world, [(channel, start) for start in starts])


def run_together(world: World, starts: Sequence[tuple[Channel, Start]]) -> float:
    """The same, each in its own channel."""
    done: list[float] = []
    world.barrier()
    begin = time.perf_counter()
    for channel, start in starts:
        channel.submit("trial", start, lambda: done.append(time.perf_counter()))
    world.progress.wait_until(lambda: len(done) == len(starts), what="the trial's collectives")
    return max(done, default=begin) - begin


def slowest_median(world: World, own: Sequence[float]) -> float:
    """The median of the slowest rank's times (collective)."""
    return statistics.median(world.all_reduce(own, "max"))


def select_reduce_scatter(
    world: World,
    buffer: Buffer,
    *,
    wire_dtype: WireDtype | None = None,
    library_can_add: bool = True,
    wrap: Wrap = unchanged,
) -> ReduceScatter:
    """The algorithm that reduces ``buffer`` in the least time; its contents are lost (collective).

    wire_dtype: in what a wider buffer is to be sent; excludes algorithms by which the library adds.
    library_can_add: whether the library can add all dtypes that are to be reduced.
    wrap: as in ``World.open_channel``.
    The slowest rank's best of a few trials counts, so that every rank selects the same.
    """
    channel = world.open_channel("trial", window=1, wrap=wrap)
    best: dict[ReduceScatter, float] = {}
    for name in get_args(ReduceScatter):
        algorithms = CollectiveAlgorithms(name, wire_dtype)
        if not algorithms.can_reduce or (name in ADDED_BY_LIBRARY and not library_can_add):
            continue
        start = partial(algorithms.start_reduce_scatter, buffer)
        best[name] = min(run_all(world, channel, [start]) for _ in range(_NUM_TRIALS))
    channel.close()
    slowest = world.all_reduce(list(best.values()), "max")
    return min(zip(slowest, best, strict=True))[1]


def select_grid(
    world: World, config: EngineConfig, make_buffer: Callable[[], Buffer], *, wrap: Wrap = unchanged
) -> tuple[Grid | None, str]:
    """The grid of ``config.topology``; of ``auto`` if both operations together take 3 % less time
    on it than on a ring (collective). None: no grid. With what ``auto`` has measured, in words.

    make_buffer: makes what is tried, and its contents are lost. wrap: as in ``World.open_channel``.
    Raises ConfigError as ``choose_grid`` does.
    """
    grid = choose_grid(world, config)
    if grid is None or config.topology != "auto":
        return grid, ""
    channel, buffer = world.open_channel("trial", window=1, wrap=wrap), make_buffer()
    best = []
    for tried in (None, grid):
        algorithms = CollectiveAlgorithms("ring", config.wire_dtype, tried)
        operations = (algorithms.start_reduce_scatter, algorithms.start_all_gather)
        starts = [partial(start, buffer) for start in operations]
        runs = [[run_all(world, channel, [start]) for start in starts] for _ in range(_NUM_TRIALS)]
        best.append(sum(min(times) for times in zip(*runs, strict=True)))
    channel.close()
    flat_s, grid_s = world.all_reduce(best, "max")
    nbytes = buffer.numel() * buffer.element_size()
    gain = GridGain("measured", nbytes, grid.text, grid_s, flat_s)
    return grid if gain.is_enough else None, str(gain)
