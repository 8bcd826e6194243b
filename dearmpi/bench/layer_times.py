"""Layer times: a few steps of a run, taken only to see how long each layer computes."""

from __future__ import annotations

from collections.abc import Sequence

from dearmpi.comm.world import World
from dearmpi.plan.model.profile import ModelProfile
from dearmpi.report.draw.units import align, count_text
from dearmpi.train.loop.job import Job
from dearmpi.train.loop.session import open_session
from dearmpi.train.loop.stepping import take_step
from dearmpi.train.ranks.agreement import together
from dearmpi.train.settings.settings import PLANNING
from dearmpi.train.settings.sources import Source, make_source, merge
from dearmpi.tune.layer_timer import LayerTimer, slowest_profile

_HEADER = ("layer", "tensors", "MB", "feed-forward ms", "backprop ms", "ready ms")
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

    Where the data are fewer than a batch, every step is alike.
    """
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
        *align([_HEADER, *(rows[place] for place in slowest)]),
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
