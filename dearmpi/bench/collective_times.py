"""Collectives by themselves: each algorithm's time, its share of the wire, and how far it runs
beside computation. Layers by themselves: a few steps, taken only to see how long each computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from dearmpi.device.comm_stream import compute_on_one_core
from dearmpi.grid import Grid
from dearmpi.plan.model.cost import LinkModel
from dearmpi.plan.model.profile import ModelProfile
from dearmpi.report.draw.units import align, count_text
from dearmpi.train.loop.job import Job
from dearmpi.train.loop.session import open_session
from dearmpi.train.loop.stepping import take_step
from dearmpi.train.ranks.agreement import together
from dearmpi.train.ranks.threads import choose_threads
from dearmpi.train.settings.settings import PLANNING
from dearmpi.train.settings.sources import Source, make_source, merge
from dearmpi.tune.calibrate import calibrate
from dearmpi.tune.calibration import Calibration
from dearmpi.tune.layer_timer import LayerTimer, slowest_profile
from dearmpi.tune.topology import measured_grid, read_topology

_BYTES_BACK_TO_BACK = 100e6
_FEWEST, _MOST = 4, 100
_CALIBRATION_S = 1.0  # for all collectives of the ranks, and for those of each dimension
_HEADER = (
    "collective",
    "MB",
    "alone ms",
    "predicted",
    "each ms",
    "Mbit/s",
    "of wire",
    "IMB",
    "OSU",
)


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
    predicted_s: of one alone, by the calibration of a topology; None without one.
    """

    name: str
    nbytes: int
    overlap: Overlap
    each_s: float
    wire_bits_s: float
    predicted_s: float | None = None


@dataclass(frozen=True, slots=True)
class CollectivesResult:
    """All of them.

    wire_dtype: in what the fp32 buffers were sent; None: as they are. wire_bits_s: the rate of a
    plain TCP stream. topology: whose grid was measured beside flat collectives, if any.
    """

    world_size: int
    hosts: int
    window: int
    wire_dtype: WireDtype | None
    wire_bits_s: float
    rows: tuple[CollectiveTimes, ...]
    topology: str = "flat"


def measure_collectives(
    world: World,
    sizes_mb: Sequence[float],
    *,
    repeats: int,
    tell: Callable[[str], None],
    wire_dtype: WireDtype | None = None,
    topology: str = "flat",
) -> CollectivesResult:
    """Measure every reduce-scatter and the all-gather on every size (collective).

    sizes_mb: of the whole buffer, in millions of bytes. Times are those of the slowest rank.
    wire_dtype: in what to send the fp32 buffers. topology: also on its grid, beside what a
    calibration predicts for fp32: that of the file, or one made here.
    There are two ranks at least. Raises ConfigError as ``measured_grid`` does.
    """
    grid = None
    if topology != "flat":
        grid = measured_grid(world, EngineConfig(topology=topology))
    choose_threads(world, requested=None, progress_thread=world.has_progress_thread)
    compute_on_one_core(world)
    wire = measure_wire(world)
    tell(f"a TCP stream carries {wire / 1e6:.0f} Mbit/s")
    links = {} if grid is None or wire_dtype else _calibrated(world, grid, topology)
    window = EngineConfig().window
    channel = world.open_channel("benchmark", window=window)
    rows = []
    for megabytes in sizes_mb:
        count = max(1, int(megabytes * 1e6 / 4 / world.size)) * world.size
        for name, operation in _operations(wire_dtype, grid).items():
            row = _measure(world, channel, name, count, operation, wire_dtype, repeats=repeats)
            if name in links:
                row = replace(row, predicted_s=links[name].alone_s(row.nbytes))
            rows.append(row)
        tell(f"{megabytes:g} MB done")
    channel.close()
    hosts = len(set(world.hosts))
    shown = "flat" if grid is None else grid.text
    return CollectivesResult(world.size, hosts, window, wire_dtype, wire, tuple(rows), shown)


def _calibrated(world: World, grid: Grid, topology: str) -> dict[str, LinkModel]:
    """By name, what the operations of a ring and of ``grid`` cost (collective)."""
    path = EngineConfig(topology=topology).topology_file
    found = None if path is None else read_topology(path)
    if not isinstance(found, Calibration):
        found = calibrate(world, CollectiveAlgorithms("ring"), budget_s=_CALIBRATION_S, grid=grid)
    of_grid, flat, links = found.grid_costs, found.costs, dict[str, LinkModel]()
    for name, costs in ((found.algorithm, flat), (str(grid), of_grid)):
        if costs is not None:
            links[f"reduce-scatter {name}"] = costs.reduce_scatter
            links[f"all-gather {name}"] = costs.all_gather
    return links


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
    rows: list[tuple[str, ...]] = [
        (
            row.name,
            f"{row.nbytes / 1e6:g}",
            f"{row.overlap.pure_s * 1e3:.2f}",
            "" if row.predicted_s is None else f"{row.predicted_s * 1e3:.2f}",
            f"{row.each_s * 1e3:.2f}",
            f"{row.wire_bits_s / 1e6:.0f}",
            f"{row.wire_bits_s / result.wire_bits_s:.1%}",
            f"{row.overlap.imb:.0%}",
            f"{row.overlap.osu:.0%}",
        )
        for row in result.rows
    ]
    table: list[tuple[str, ...]] = [_HEADER, *rows]
    if all(row.predicted_s is None for row in result.rows):
        table = [(*cells[:3], *cells[4:]) for cells in table]
    return [
        f"{result.world_size} ranks on {count_text(result.hosts, 'host')}; a TCP stream carries "
        f"{result.wire_bits_s / 1e6:.0f} Mbit/s",
        *([f"MB in fp32, sent as {result.wire_dtype}"] if result.wire_dtype else []),
        f"each: back to back, {result.window} in flight; IMB, OSU: overlap with computation that "
        "needs no core, as those benchmarks define it",
        "",
        *align(table),
    ]


def _operations(wire_dtype: WireDtype | None, grid: Grid | None) -> dict[str, Operation]:
    """Every reduce-scatter, then every all-gather, by name; those on ``grid`` last."""
    reduces: dict[str, Operation] = {}
    gathers: dict[str, Operation] = {}
    for algorithm in get_args(ReduceScatter):
        algorithms = CollectiveAlgorithms(algorithm, wire_dtype)
        if algorithms.can_reduce:
            reduces[f"reduce-scatter {algorithm}"] = algorithms.start_reduce_scatter
        gathers[f"all-gather {algorithms.all_gather}"] = algorithms.start_all_gather
    if grid is not None:
        algorithms = CollectiveAlgorithms("ring", wire_dtype, grid)
        reduces[f"reduce-scatter {grid}"] = algorithms.start_reduce_scatter
        gathers[f"all-gather {grid}"] = algorithms.start_all_gather
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


_LAYER_HEADER = ("layer", "tensors", "MB", "feed-forward ms", "backprop ms", "ready ms")
_MOST_ROWS = 40
_NO_PLAN = {"plan": "none"}  # the profile is over before one is found


def measure_layers(
    world: World, sources: Sequence[Source], *, num_warmup: int, num_batches: int
) -> ModelProfile:
    """Train the run that ``sources`` of settings describe, and profile its model (collective).

    Of ``num_warmup + num_batches`` steps the first do not count. The slowest rank's times do.
    """
    if merge(sources).get("plan") in (None, *PLANNING):  # not given: runs may plan by themselves
        sources = [make_source("flag", _NO_PLAN), *sources]
    job = open_session(world, sources).job
    optimizer, micro_batches = job.optimizer, job.batches.micro_batches
    timer = LayerTimer(
        job.task.model,
        params=[param for group in optimizer.param_groups for param in group["params"]],
        num_warmup=num_warmup * micro_batches,
        waited=lambda: optimizer.waited_s,
    )
    for number in range(num_warmup + num_batches):
        take_step(job, _full_step(job, number))
    optimizer.close()
    job.loading.close()
    with together(world):
        profile = timer.finish(
            name=job.task.name,
            batch_size=_samples_of_a_pass(job),
            unit=job.task.unit.removesuffix("s") if job.task.units_per_sample == 1 else "sample",
            world_size=world.size,
        )
    return slowest_profile(world, profile)


def _full_step(job: Job, number: int) -> int:
    """Which step of the run is the ``number``th whose batch is whole: others may leave ranks idle.

    Where the data are fewer than a batch, every step is alike, and a stream may end anywhere.
    """
    if job.batches.num_samples is None:
        return number
    per_epoch = max(1, job.batches.num_samples // job.batches.batch_size)
    epoch, step = divmod(number, per_epoch)
    return epoch * job.batches.steps_per_epoch + step


def _samples_of_a_pass(job: Job) -> int:
    """Of one micro-batch of a full step, on the rank that has most."""
    return -(-job.batches.batch_size // (job.world.size * job.batches.micro_batches))


def describe_profile(profile: ModelProfile) -> list[str]:
    """Lines: what was measured, and a table of the layers, or of the slowest if there are many."""
    workload = profile.workload
    rows = _rows(profile)
    seconds = [times.feed_forward_s + times.backprop_s for times in profile.times]
    slowest = sorted(sorted(range(len(rows)), key=lambda i: -seconds[i])[:_MOST_ROWS])
    num_bytes = sum(spec.nbytes for spec in workload.params())
    lines = [
        f"{workload.name}: {len(rows)} layers, {workload.num_tensors} tensors, "
        f"{num_bytes / 1e6:.1f} MB, batch size {workload.batch_size} per rank, "
        f"{count_text(profile.world_size, 'rank')}, {profile.device}",
        f"feed-forward {profile.feed_forward_s * 1e3:.2f} ms, backprop "
        f"{profile.backprop_s * 1e3:.2f} ms; {workload.source}, waits left out",
        "",
        *align([_LAYER_HEADER, *(rows[place] for place in slowest)]),
    ]
    if len(slowest) < len(rows):
        rest_s = sum(seconds) - sum(seconds[place] for place in slowest)
        lines.append(f"and {len(rows) - len(slowest)} faster ones, {rest_s * 1e3:.3f} ms in all")
    return lines


def _rows(profile: ModelProfile) -> list[tuple[str, ...]]:
    """A row per layer. Backprop goes from the last to the first, which is ready at its end."""
    rows: list[tuple[str, ...]] = []
    ready_s = profile.backprop_s
    for layer, times in profile.layers():
        rows.append(
            (
                layer.name or "(the model itself)",
                str(len(layer.params)),
                f"{sum(spec.nbytes for spec in layer.params) / 1e6:.3f}",
                f"{times.feed_forward_s * 1e3:.3f}",
                f"{times.backprop_s * 1e3:.3f}",
                f"{ready_s * 1e3:.3f}",
            )
        )
        ready_s -= times.backprop_s
    return rows
