"""dear-train calibrate: what the collectives of this job cost."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dearmpi.cli.console import Console
from dearmpi.cli.options import engine_option
from dearmpi.cli.output_files import OUT, check_place, write
from dearmpi.cli.ranks import measure_together
from dearmpi.config import ReduceScatter
from dearmpi.errors import ConfigError, MeasurementError

if TYPE_CHECKING:
    from dearmpi.comm.world import World
    from dearmpi.plan.model.cost import LinkFit
    from dearmpi.tune.calibration import Calibration, SizeTimes

NO_TIME_PER_BYTE = "no time per byte was seen: calibrate for longer with --seconds"
_WARM_UP_S = 2.0
_HEADER = ("collective", "KiB", "alone ms", "in flight: each ms", "fitted alone ms")


@click.command(short_help="Measure what the collectives of this job cost.")
@click.option("--out", type=OUT, metavar="FILE", help="write everything there, as JSON")
@engine_option("reduce_scatter", without=("auto",), help="the algorithm to measure")
@click.option(
    "--seconds",
    type=float,
    default=1.0,
    show_default=True,
    help=f"how long it may take, after {_WARM_UP_S:g} s of warm-up",
)
def calibrate(out: Path | None, reduce_scatter: ReduceScatter, seconds: float) -> int:
    """Measure what reduce-scatters and all-gathers cost between the ranks of this job, alone and
    with two in flight, and fit alpha + beta * bytes to it:

    \b
      mpirun -n 4 dear-train calibrate --out link.json

    A plan and `dear-train simulate` take the file. Both carry it over to other numbers of ranks.
    Ends with 1 where no plan can be made of the times, as `dear-train plan` does then.
    """

    def measure(world: World, console: Console) -> int:
        from dearmpi.comm.algorithms.registry import CollectiveAlgorithms
        from dearmpi.engine.device.comm_stream import compute_on_one_core
        from dearmpi.train.ranks.agreement import together
        from dearmpi.train.run.session import mpi_library
        from dearmpi.tune import calibrate as tuning

        console.needed = out is None
        with together(world):
            check_place(world, out)
            if not 0 < seconds < math.inf:
                raise ConfigError(
                    f"--seconds is {seconds}; it must be above 0, and finite", code="out-of-range"
                )
            if world.size == 1:
                raise ConfigError(
                    "one rank has no collectives; start several with mpirun", code="one-rank-only"
                )
        compute_on_one_core(world)  # as training does
        result = tuning.calibrate(
            world,
            CollectiveAlgorithms(reduce_scatter),
            library=mpi_library(),
            budget_s=seconds,
            warm_up_s=_WARM_UP_S,
        )
        write(world, console, out, result.to_json())
        console.say(*describe_calibration(result))
        return 0 if result.flaw is None else MeasurementError.exit_code

    return measure_together(measure)


def describe_calibration(result: Calibration) -> list[str]:
    """Lines: where it was measured, a table of times, and what was fitted."""
    from dearmpi.report.draw.text import align

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
    return lines if result.flaw is None else [*lines, result.flaw]


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
