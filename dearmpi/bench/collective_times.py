"""Collectives by themselves: each algorithm's time, its share of the wire, and how far it runs
beside computation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import get_args

import torch

from dearmpi.bench.link import measure_wire
from dearmpi.comm.algorithms.registry import (
    CollectiveAlgorithms,
    Operation,
    Start,
    run_all,
    slowest_median,
)
from dearmpi.comm.algorithms.scratch import carrier_of
from dearmpi.comm.progress.channel import Channel
from dearmpi.comm.world import World
from dearmpi.config import EngineConfig, ReduceScatter, WireDtype
from dearmpi.engine.device.comm_stream import compute_on_one_core
from dearmpi.errors import ConfigError
from dearmpi.report.draw.units import align, count_text
from dearmpi.train.ranks.threads import choose_threads

_BYTES_BACK_TO_BACK = 100e6
_FEWEST, _MOST = 4, 100
_HEADER = ("collective", "MB", "alone ms", "each ms", "Mbit/s", "of wire", "IMB", "OSU")


@dataclass(frozen=True, slots=True)
class Overlap:
    """One operation, and computation of about the same length, alone and together; seconds."""

    pure_s: float
    compute_s: float
    together_s: float

    @property
    def imb(self) -> float:
        """The share of the shorter one that the longer one hides, as Intel's IMB-NBC defines."""
        hidden_s = self.pure_s + self.compute_s - self.together_s
        return max(0.0, min(1.0, hidden_s / min(self.pure_s, self.compute_s)))

    @property
    def osu(self) -> float:
        """The share of communication that adds nothing to computation, as OSU's benchmarks do."""
        return max(0.0, min(1.0, 1.0 - (self.together_s - self.compute_s) / self.pure_s))


@dataclass(frozen=True, slots=True)
class CollectiveTimes:
    """One collective on ``nbytes`` per rank.

    each_s: seconds of each of many, back to back in the engine's window.
    wire_bits_s: bits per second that each rank sends meanwhile.
    """

    name: str
    nbytes: int
    overlap: Overlap
    each_s: float
    wire_bits_s: float


@dataclass(frozen=True, slots=True)
class CollectivesResult:
    """All of them.

    wire_dtype: in what the fp32 buffers were sent; None: as they are. wire_bits_s: the rate of a
    plain TCP stream.
    """

    world_size: int
    hosts: int
    window: int
    wire_dtype: WireDtype | None
    wire_bits_s: float
    rows: tuple[CollectiveTimes, ...]


def measure_collectives(
    world: World,
    sizes_mb: Sequence[float],
    *,
    repeats: int,
    tell: Callable[[str], None],
    wire_dtype: WireDtype | None = None,
) -> CollectivesResult:
    """Measure every reduce-scatter and the all-gather on every size (collective).

    sizes_mb: of the whole buffer, in millions of bytes. Times are those of the slowest rank.
    wire_dtype: in what to send the fp32 buffers.
    """
    if world.size == 1:
        raise ConfigError(
            "one rank has no collectives; start several with mpirun", code="one-rank-only"
        )
    choose_threads(world, requested=None, progress_thread=world.has_progress_thread)
    compute_on_one_core(world)
    wire = measure_wire(world)
    tell(f"a TCP stream carries {wire / 1e6:.0f} Mbit/s")
    window = EngineConfig().window
    channel = world.open_channel("benchmark", window=window)
    rows = []
    for megabytes in sizes_mb:
        count = max(1, int(megabytes * 1e6 / 4 / world.size)) * world.size
        for name, operation in _operations(wire_dtype).items():
            rows.append(
                _measure(world, channel, name, count, operation, wire_dtype, repeats=repeats)
            )
        tell(f"{megabytes:g} MB done")
    channel.close()
    hosts = len(set(world.hosts))
    return CollectivesResult(world.size, hosts, window, wire_dtype, wire, tuple(rows))


def measure_overlap(world: World, channel: Channel, start: Start, *, repeats: int) -> Overlap:
    """One operation alone, and beside computation that takes as long (collective).

    Nothing is measured in the first, extra repetition.
    """
    run_all(world, channel, [start])
    pure_s = slowest_median(world, [run_all(world, channel, [start]) for _ in range(repeats)])
    both = [_run_beside(world, channel, start, pure_s) for _ in range(repeats)]
    return Overlap(
        pure_s,
        slowest_median(world, [compute_s for compute_s, _ in both]),
        slowest_median(world, [together_s for _, together_s in both]),
    )


def describe_collectives(result: CollectivesResult) -> list[str]:
    """Lines: what was measured, and a table."""
    rows = [
        (
            row.name,
            f"{row.nbytes / 1e6:g}",
            f"{row.overlap.pure_s * 1e3:.2f}",
            f"{row.each_s * 1e3:.2f}",
            f"{row.wire_bits_s / 1e6:.0f}",
            f"{row.wire_bits_s / result.wire_bits_s:.1%}",
            f"{row.overlap.imb:.0%}",
            f"{row.overlap.osu:.0%}",
        )
        for row in result.rows
    ]
    return [
        f"{result.world_size} ranks on {count_text(result.hosts, 'host')}; a TCP stream carries "
        f"{result.wire_bits_s / 1e6:.0f} Mbit/s",
        *([f"MB in fp32, sent as {result.wire_dtype}"] if result.wire_dtype else []),
        f"each: back to back, {result.window} in flight; IMB, OSU: overlap with computation that "
        "needs no core, as those benchmarks define it",
        "",
        *align([_HEADER, *rows]),
    ]


def _operations(wire_dtype: WireDtype | None) -> dict[str, Operation]:
    """Every reduce-scatter, then every all-gather, by name."""
    reduces: dict[str, Operation] = {}
    gathers: dict[str, Operation] = {}
    for algorithm in get_args(ReduceScatter):
        algorithms = CollectiveAlgorithms(algorithm, wire_dtype)
        if algorithms.can_reduce:
            reduces[f"reduce-scatter {algorithm}"] = algorithms.start_reduce_scatter
        gathers[f"all-gather {algorithms.all_gather}"] = algorithms.start_all_gather
    return reduces | gathers


def _measure(
    world: World,
    channel: Channel,
    name: str,
    count: int,
    operation: Operation,
    wire_dtype: WireDtype | None,
    *,
    repeats: int,
) -> CollectiveTimes:
    buffers = [torch.empty(count).fill_(0) for _ in range(4)]
    nbytes = count * buffers[0].element_size()
    length = min(_MOST, max(_FEWEST, round(_BYTES_BACK_TO_BACK / nbytes)))
    many = [partial(operation, buffers[i % len(buffers)]) for i in range(length)]
    overlap = measure_overlap(world, channel, many[0], repeats=repeats)
    each_s = slowest_median(world, [run_all(world, channel, many) / length for _ in range(repeats)])
    sent_bytes = count * carrier_of(buffers[0], wire_dtype).element_size()
    sent_bits = 8 * sent_bytes * (world.size - 1) / world.size
    return CollectiveTimes(name, nbytes, overlap, each_s, sent_bits / each_s)


def _run_beside(
    world: World, channel: Channel, start: Start, seconds: float
) -> tuple[float, float]:
    """Computation of ``seconds`` alone, and an operation with the same beside it."""
    before = time.perf_counter()
    time.sleep(seconds)
    compute_s = time.perf_counter() - before
    done: list[bool] = []
    world.barrier()
    before = time.perf_counter()
    channel.submit("benchmark", start, lambda: done.append(True))
    time.sleep(seconds)
    world.progress.wait_until(lambda: bool(done), what="the benchmark's collective")
    return compute_s, time.perf_counter() - before
