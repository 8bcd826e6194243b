"""dear-train calibrate and profile: what the collectives of this job cost, and a task's layers."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dearmpi.cli.console import Console
from dearmpi.cli.endings import measure_together
from dearmpi.cli.flags import (
    OUT,
    RunCommand,
    check_apart,
    check_place,
    density_option,
    engine_option,
    setting_options,
    topology_option,
    write,
)
from dearmpi.cli.run import carry_out_together, read_sources
from dearmpi.config import Compress, EngineConfig, ReduceScatter
from dearmpi.errors import ConfigError, MeasurementError
from dearmpi.train.settings.settings import PLANNING, SETTINGS
from dearmpi.train.settings.sources import without

if TYPE_CHECKING:
    from dearmpi.cli.endings import RankLog
    from dearmpi.comm.world import World
    from dearmpi.plan.model.cost import LinkFit
    from dearmpi.train.settings.sources import Source
    from dearmpi.tune.calibration import Calibration, GridTimes, SizeTimes

NO_TIME_PER_BYTE = "no time per byte was seen: calibrate for longer with --seconds"
_WARM_UP_S = 2.0
_BUCKET = 25_000_000
_HEADER = ("collective", "KiB", "alone ms", "in flight: each ms", "fitted alone ms")


@click.command(short_help="Measure what collectives cost.")
@click.option("--out", type=OUT, metavar="FILE", help="write everything there, as JSON")
@engine_option("reduce_scatter", without=("auto",), help="the algorithm to measure")
@click.option(
    "--seconds",
    type=float,
    default=1.0,
    show_default=True,
    help=f"how long it may take, after {_WARM_UP_S:g} s of warm-up",
)
@engine_option("compress", help="also measure what compression sends and computes")
@density_option()
@topology_option(
    help="also measure each dimension: hosts, sizes such as 2x2, or a .json file of racks",
)
def calibrate(**given: Any) -> int:
    """Measure what reduce-scatters and all-gathers cost between the ranks of this job, alone and
    with two in flight, and fit alpha + beta * bytes to it:

    \b
      mpirun -n 4 dear-train calibrate --out link.json
      mpirun -n 4 dear-train calibrate --topology hosts --out link.json

    A plan and `dear-train simulate` take the file. Both carry it over to other numbers of ranks.
    Ends with 1 where no plan can be made of the times, as `dear-train plan` does then.
    """
    return measure_together(lambda world, console: _calibrate(world, console, **given))


def _calibrate(
    world: World,
    console: Console,
    *,
    out: Path | None,
    reduce_scatter: ReduceScatter,
    seconds: float,
    compress: Compress,
    density: float | None,
    topology: str,
) -> int:
    from dearmpi.comm.algorithms.registry import CollectiveAlgorithms
    from dearmpi.device.comm_stream import compute_on_one_core
    from dearmpi.engine.codec.timing import measure_codec
    from dearmpi.plan.model.codec_cost import require_known_bytes
    from dearmpi.train.ranks.agreement import together
    from dearmpi.train.run.environment import mpi_library
    from dearmpi.tune import calibrate as tuning
    from dearmpi.tune.topology import measured_grid

    console.needed = out is None
    with together(world):
        check_place(world, out)
        if not 0 < seconds < math.inf:
            raise ConfigError(
                f"--seconds is {seconds}; it must be above 0, and finite", code="out-of-range"
            )
        grouped = EngineConfig(topology=topology, reduce_scatter=reduce_scatter)
        if world.size == 1:
            raise ConfigError(
                "one rank has no collectives; start several with mpirun", code="one-rank-only"
            )
        require_known_bytes(compress)
        config = EngineConfig(compress=compress, density=density)
    grid = None if topology == "flat" else measured_grid(world, grouped)
    compute_on_one_core(world)  # as training does
    result = tuning.calibrate(
        world,
        CollectiveAlgorithms(reduce_scatter),
        library=mpi_library(),
        budget_s=seconds,
        warm_up_s=_WARM_UP_S,
        codec=None if compress == "none" else measure_codec(world, config),
        grid=grid,
    )
    write(world, console, out, result.to_json())
    console.say(*describe_calibration(result))
    return 0 if result.flaw is None else MeasurementError.exit_code


def describe_calibration(result: Calibration) -> list[str]:
    """Lines: where it was measured, a table of times, and what was fitted."""
    from dearmpi.report.draw.units import align

    names = (f"reduce-scatter {result.algorithm}", "all-gather")
    halves = list(zip(names, (result.reduce_scatter, result.all_gather), result.fits, strict=True))
    rows = [
        _cells(name, times, fit.link.alone_s(times.nbytes))
        for name, samples, fit in halves
        for times in samples
    ]
    lines = [
        f"{result.world_size} ranks on {', '.join(dict.fromkeys(result.hosts))}; {result.library}",
        "",
        *align([_HEADER, *rows]),
        "",
    ]
    for name, _, fit in halves:
        lines.append(f"{name}: {_describe_fit(fit, result.world_size)}")
    if result.grid is not None:
        lines += _describe_grid(result, result.grid)
    if (codec := result.codec) is not None:
        lines.append(
            f"compress {codec.about}: {codec.reduced:.1%} of the bytes reduced and "
            f"{codec.gathered:.1%} gathered, computes {codec.reduce_s_per_byte * 1e9:.2f} and "
            f"{codec.gather_s_per_byte * 1e9:.2f} ns per byte"
        )
    return lines if result.flaw is None else [*lines, result.flaw]


def _describe_grid(result: Calibration, grid: GridTimes) -> list[str]:
    from dearmpi.tune.calibration import fit_sizes

    lines = []
    for number, one in enumerate(grid.dimensions, 1):
        for name, samples in (
            ("reduce-scatter", one.reduce_scatter),
            ("all-gather", one.all_gather),
        ):
            fit = _describe_fit(fit_sizes(samples), one.num_ranks)
            lines.append(f"dimension {number} of {grid.topology}, {name}: {fit}")
    flat_s = result.costs.both_alone_s(_BUCKET)
    predicted = ", ".join(
        f"{costs.both_alone_s(_BUCKET) * 1e3:.1f} ms predicted by {topology}"
        for topology, costs in grid.costs_by_topology(result.costs).items()
    )
    return [
        *lines,
        f"{grid.hidden:.0%} of the other dimensions' time passes beside the busiest one",
        f"both operations on {_BUCKET / 1e6:g} MB: {flat_s * 1e3:.1f} ms flat, {predicted}",
    ]


def _describe_fit(fit: LinkFit, world_size: int) -> str:
    link, error = fit.link, f"+-{fit.relative_error:.0%}"
    if not link.beta_s_per_byte:
        return f"{link.alpha_s * 1e3:.3f} ms, {error}; {NO_TIME_PER_BYTE}"
    rate = (world_size - 1) / world_size / link.beta_s_per_byte * 8e-6
    return (
        f"{link.alpha_s * 1e3:.3f} ms + {link.beta_s_per_byte * 1e9:.3f} ns per byte "
        f"({rate:.0f} Mbit/s sent), {error}; on the wire {link.wire_share:.0%} of the latter"
    )


def _cells(name: str, times: SizeTimes, fitted_s: float) -> tuple[str, ...]:
    return (
        name,
        f"{times.nbytes / 1024:.0f}",
        f"{times.alone_s * 1e3:.3f}",
        f"{times.pair_s / 2 * 1e3:.3f}",
        f"{fitted_s * 1e3:.3f}",
    )


_OF_A_RUN = (
    *("run_folder", "name", "resume", "max_time_s", "checkpoint_interval", "keep"),
    *(
        "checkpoint_time_s",
        "mtbf_hours",
        "log_interval",
        "log_time_s",
        "eval_interval",
        "keep_best",
        "patience",
        "tracker",
        "tensorboard",
        "trace",
    ),
)
# In a file the length stays: the curve of the learning rate is made of it.
_WITHOUT_EFFECT = ("epochs", "max_steps", *_OF_A_RUN)


def _profile(
    config: str | None, out: Path | None, num_warmup: int, num_batches: int, **given: object
) -> int:
    """Train for a few steps and measure how long each layer computes:

    \b
      dear-train profile --task digits --out digits.json
      mpirun -n 4 dear-train profile --task digits --out digits.json

    Takes the flags of `dear-train run` that say what is trained and how; in a --config file or the
    environment the others may stand as well, but no checkpoint is read. Nothing is kept of what was
    trained. With several ranks the slowest counts. `dear-train bench --workload FILE` replays the
    result.
    """

    def read() -> list[Source]:
        check_lengths(num_warmup, num_batches)
        check_flags(given)
        return [without(source, _OF_A_RUN) for source in read_sources(given, os.environ, config)]

    def carry_out(world: World, sources: Sequence[Source], _log: RankLog) -> int:
        from dearmpi.bench.collective_times import describe_profile, measure_layers
        from dearmpi.train.ranks.agreement import together

        with together(world, root_only=True):
            read = {"--config": config, "--plan": str(given["plan"] or "")}
            if world.is_root:
                check_apart({"--out": out}, read)
            check_place(world, out)
        console = Console(speaks=world.is_root, launched=world.size > 1)
        profile = measure_layers(world, sources, num_warmup=num_warmup, num_batches=num_batches)
        console.say(*describe_profile(profile))
        write(world, console, out, profile.to_json())
        return 0

    return carry_out_together(read, carry_out)


profile = RunCommand(
    "profile",
    callback=_profile,
    params=[
        click.Option(["--out"], type=OUT, metavar="FILE", help="write everything there, as JSON"),
        click.Option(
            ["--num-warmup-batches", "num_warmup"],
            type=int,
            default=2,
            show_default=True,
            metavar="N",
            help="steps that do not count",
        ),
        click.Option(
            ["--num-batches", "num_batches"],
            type=int,
            default=5,
            show_default=True,
            metavar="N",
            help="steps that do; medians are told",
        ),
        # A plan's file may be given, but what a plan does for a run is not to be looked for here.
        *setting_options(hidden=(*_WITHOUT_EFFECT, "plan")),
    ],
    help=_profile.__doc__,
    short_help="Measure how long each layer computes.",
)


def check_flags(given: Mapping[str, object]) -> None:
    """Raise ConfigError for a flag of a run that changes nothing about a profile."""
    for name in _WITHOUT_EFFECT:
        if given[name] not in (None, ()):
            raise ConfigError(
                f"--{SETTINGS[name].flag} has no effect on a profile, which trains for "
                "--num-warmup-batches and --num-batches steps and keeps nothing; leave it out",
                code="setting-without-effect",
            )
    if given["plan"] in PLANNING:
        raise ConfigError(
            f"--plan {given['plan']} has no effect on a profile, which is over before a plan is "
            "found; leave it out, or name the file of one",
            code="setting-without-effect",
        )


def check_lengths(num_warmup: int, num_batches: int) -> None:
    """Raise ConfigError where there is nothing to measure."""
    if num_warmup < 0 or num_batches < 1:
        raise ConfigError(
            f"{num_warmup} warm-up batches and {num_batches} that count; at least 0 and 1 are "
            "needed",
            code="out-of-range",
        )
