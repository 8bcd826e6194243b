"""Calibrate: measure what reduce-scatters and all-gathers of this job cost, in a second at most;
and how fast the wire is in training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from dearmpi.comm.algorithms.registry import (
    CollectiveAlgorithms,
    Operation,
    run_all,
    run_together,
)
from dearmpi.comm.progress.channel import Channel
from dearmpi.comm.world import World
from dearmpi.cuts import even_cuts
from dearmpi.errors import ConfigError
from dearmpi.grid import Grid
from dearmpi.plan.model.codec_cost import CodecCost
from dearmpi.tune.calibration import (
    Calibration,
    DimensionTimes,
    GridTimes,
    SizeTimes,
    parse_calibration,
)

_NUM_REPEATS = 3  # fewer where the time does not allow as many
WINDOWS = (1, 2)


@dataclass(frozen=True, slots=True)
class Rung:
    """Measured together: ``length`` operations of ``nbytes``, one after the other.

    Several, as in training: what a network lets through at once after a pause shall not count, nor
    what ranks that begin and end together lose at both ends.
    """

    nbytes: int
    length: int


_FEWEST_RUNGS = 2  # that a line can be drawn through
LADDER = (Rung(1 << 16, 8), Rung(1 << 19, 4), Rung(1 << 22, 4), Rung(1 << 25, 4))

Run = Callable[[int, int], float]
"""Runs so many of the prepared operations, with so many in flight; the seconds on this rank."""

Prepare = Callable[[int, int], Run]
"""Makes ready operations on buffers of so many fp32 elements each, and so many of them."""


def climb(
    world: World,
    operations: Sequence[Prepare],
    *,
    budget_s: float,
    most_bytes: int = LADDER[-1].nbytes,
) -> list[tuple[SizeTimes, ...]]:
    """The times of each of ``operations`` at several sizes, whole shards each (collective).

    Operations follow one another, with one and with two of them in flight; the least of the
    slowest rank's times counts, since whatever else goes on makes them longer. Two sizes are
    measured even if that takes longer than ``budget_s``, and more of the ladder as far as the time
    and ``most_bytes`` allow: the last as large as they do.
    """
    found: list[list[SizeTimes]] = [[] for _ in operations]
    begin = time.perf_counter()
    for number, rung in enumerate(LADDER):
        left_s = budget_s - world.all_reduce([time.perf_counter() - begin], "max")[0]
        nbytes = rung.nbytes
        if number >= _FEWEST_RUNGS:
            # What is compared is the same on all ranks, so all of them stop here or none.
            nbytes = min(nbytes, most_bytes, _affordable_bytes(found, rung.length, left_s))
            if nbytes < 2 * found[0][-1].nbytes:
                break
        for prepare, times in zip(operations, found, strict=True):
            share_s = left_s / len(operations)
            times.append(_measure(world, prepare, Rung(nbytes, rung.length), budget_s=share_s))
    return [tuple(times) for times in found]


def _affordable_bytes(found: Sequence[Sequence[SizeTimes]], length: int, left_s: float) -> int:
    """How large operations may be to be measured once in ``left_s``, as the last two sizes tell."""
    one, other = ([times[place] for times in found] for place in (-2, -1))
    nbytes, alone_s = other[0].nbytes, sum(times.alone_s for times in other)
    slope = (alone_s - sum(times.alone_s for times in one)) / (nbytes - one[0].nbytes)
    num_operations = 1 + len(WINDOWS) * length
    most_s = left_s / num_operations - alone_s
    if most_s <= 0:
        return 0
    return nbytes + int(most_s / max(slope, 1e-12))  # 1 TB/s: faster than what was ever measured


def _measure(world: World, prepare: Prepare, rung: Rung, *, budget_s: float) -> SizeTimes:
    """Times on ``rung``, its size rounded to whole shards (collective)."""
    count = even_cuts(-(-rung.nbytes // 4), world.size).total
    run = prepare(count, rung.length)
    first_s = world.all_reduce([run(1, 1)], "max")[0]
    affordable = budget_s / (len(WINDOWS) * rung.length * first_s)
    repeats = int(min(_NUM_REPEATS, max(1, affordable)))
    each_s = [
        min(world.all_reduce([run(rung.length, window) for _ in range(repeats)], "max"))
        / rung.length
        for window in WINDOWS
    ]
    return SizeTimes(4 * count, each_s[0], 2 * each_s[1])


def calibrate(
    world: World,
    algorithms: CollectiveAlgorithms,
    *,
    library: str = "",
    budget_s: float = 1,
    warm_up_s: float = 0,
    most_bytes: int = LADDER[-1].nbytes,
    codec: CodecCost | None = None,
    grid: Grid | None = None,
) -> Calibration:
    """Measure both operations, on the engine's way, at sizes as large as the time allows.

    As in training, operations follow one another, with one and with two of them in flight; the
    least of the slowest rank's times counts. The result is the same on all ranks (collective).
    algorithms: how the fp32 buffers are sent, whose bytes count. library: the MPI library's name.
    budget_s: what all measurements together may take. warm_up_s: for how long to measure before
    that in vain, since new TCP connections carry less at first. most_bytes: of one buffer; a few
    are in use at once. Two sizes are measured even if that takes longer, or more. codec: what
    compression costs, to be kept beside the times. grid: whose dimensions are measured too, in as
    long for each.

    Raises ConfigError in a world of one, in which nothing is sent.
    """
    if world.size == 1:
        raise ConfigError(
            "one rank has no collectives to measure; start several with mpirun",
            code="one-rank-only",
        )
    channels = {window: world.open_channel("trial", window=window) for window in WINDOWS}
    operations = (algorithms.start_reduce_scatter, algorithms.start_all_gather)
    prepared = [partial(_prepare, world, channels, operation) for operation in operations]
    if warm_up_s > 0:
        climb(world, prepared, budget_s=warm_up_s, most_bytes=most_bytes)
    reduces, gathers = climb(world, prepared, budget_s=budget_s, most_bytes=most_bytes)
    for channel in channels.values():
        channel.close()
    name = algorithms.reduce_scatter
    times = None
    if grid is not None:
        times = _measure_grid(world, grid, budget_s=budget_s, most_bytes=most_bytes)
    own = Calibration(world.hosts, library, name, reduces, gathers, codec=codec, grid=times)
    return parse_calibration(world.broadcast_text(own.to_json()), "the calibration of rank 0")


def _prepare(
    world: World, channels: dict[int, Channel], operation: Operation, numel: int, count: int
) -> Run:
    # Filled, since a page without a write before is slow at first.
    starts = [
        partial(operation, torch.empty(numel, dtype=torch.float32, device="cpu").fill_(0.0))
        for _ in range(count)
    ]
    return lambda num, window: run_all(world, channels[window], starts[:num])


def _measure_grid(world: World, grid: Grid, *, budget_s: float, most_bytes: int) -> GridTimes:
    """Each dimension alone, in all of its lines of ranks at once, and all together (collective)."""
    lanes: list[dict[int, Channel]] = []
    ways: list[CollectiveAlgorithms] = []
    dimensions: list[DimensionTimes] = []
    place = grid.order.index(world.rank)
    for number, size in enumerate(grid.sizes):
        stride = math.prod(grid.sizes[:number])
        first = place - place // stride % size * stride
        line = world.split(first)
        assert line is not None
        members = [grid.order[first + at * stride] for at in range(size)]
        order = [sorted(members).index(rank) for rank in members]
        way = CollectiveAlgorithms("ring", grid=Grid((size,), tuple(order)))
        channels = {window: line.open_channel("trial", window=window) for window in WINDOWS}
        operations = (way.start_reduce_scatter, way.start_all_gather)
        prepared = [partial(_prepare, world, channels, operation) for operation in operations]
        reduces, gathers = climb(world, prepared, budget_s=budget_s, most_bytes=most_bytes)
        lanes.append(channels)
        ways.append(way)
        dimensions.append(DimensionTimes(size, reduces, gathers))
    hidden = _hidden_share(world, dimensions, ways, [one[WINDOWS[-1]] for one in lanes])
    for channels in lanes:
        for channel in channels.values():
            channel.close()
    return GridTimes(grid.text, tuple(dimensions), hidden)


_LENGTH_AT_ONCE = 4


def _hidden_share(
    world: World,
    dimensions: Sequence[DimensionTimes],
    ways: Sequence[CollectiveAlgorithms],
    channels: Sequence[Channel],
) -> float:
    """The part of the other dimensions' time that passes beside the busiest one's (collective).

    All carry about as long: as the quickest one takes for its largest buffer.
    """
    largest = [one.reduce_scatter[-1] for one in dimensions]
    least_s = min(times.alone_s for times in largest)
    work = []
    for times, way, channel in zip(largest, ways, channels, strict=True):
        nbytes = int(times.nbytes * least_s / times.alone_s)
        numel = even_cuts(max(1, nbytes // 4), world.size).total
        buffers = [
            torch.empty(numel, dtype=torch.float32, device="cpu").fill_(0.0)
            for _ in range(_LENGTH_AT_ONCE)
        ]
        work.append([(channel, partial(way.start_reduce_scatter, buffer)) for buffer in buffers])
    rounds = [[*work, [one for part in work for one in part]] for _ in range(1 + _NUM_REPEATS)]
    own = [[run_together(world, part) for part in parts] for parts in rounds][1:]
    *alone, at_once = world.all_reduce([min(times) for times in zip(*own, strict=True)], "max")
    saved_s, most_s = sum(alone) - at_once, sum(alone) - max(alone)
    return min(1.0, max(0.0, saved_s / most_s)) if most_s else 0.0


_LEAST_WIRE_S = 0.05  # below, it matters how ranks differ in when they begin


class Crossed(NamedTuple):
    """An operation that is over: from posting to completion, and for how long it should have
    needed the whole wire, in seconds.
    """

    start_s: float
    stop_s: float
    wire_s: float


def wire_pace(crossings: Iterable[Crossed]) -> float:
    """The least time over what was expected, of stretches with something always under way.

    ``crossings``: of one kind, since one kind may need longer than another for the same bytes.
    At most 1: what takes longer may have waited for another rank. A stretch counts from where all
    operations are over that were posted before its first was: other ranks may have begun those
    earlier. Of what is under way there, as large a part counts as there is left of its time.
    """
    return min((_pace(stretch) for stretch in _stretches(crossings)), default=1.0)


def _stretches(crossings: Iterable[Crossed]) -> list[list[Crossed]]:
    """The operations, in order of posting, parted where nothing was under way."""
    stretches: list[list[Crossed]] = []
    stop_s = float("-inf")
    for crossing in sorted(crossings):
        if crossing.start_s > stop_s:
            stretches.append([])
        stretches[-1].append(crossing)
        stop_s = max(stop_s, crossing.stop_s)
    return stretches


def _pace(stretch: list[Crossed]) -> float:
    first_stop_s = min(crossing.stop_s for crossing in stretch)
    begin_s = max(crossing.stop_s for crossing in stretch if crossing.start_s < first_stop_s)
    wire_s = sum(
        one.wire_s * (one.stop_s - max(one.start_s, begin_s)) / (one.stop_s - one.start_s)
        for one in stretch
        if one.stop_s > max(one.start_s, begin_s)
    )
    if wire_s < _LEAST_WIRE_S:
        return 1.0
    return min(1.0, (max(crossing.stop_s for crossing in stretch) - begin_s) / wire_s)
