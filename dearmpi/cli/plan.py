"""dear-train plan: from the times of layers and of collectives to buckets and their order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dearmpi.cli.console import Console
from dearmpi.cli.flags import (
    OUT,
    check_apart,
    check_picture,
    check_writable,
    density_option,
    engine_option,
    picture_option,
    write_file,
    write_picture,
)
from dearmpi.cli.measure import NO_TIME_PER_BYTE
from dearmpi.config import CommDtype, Compress, EngineConfig, Gather
from dearmpi.errors import ConfigError, MeasurementError
from dearmpi.report.draw.units import count_text
from dearmpi.version import describe_other_version

if TYPE_CHECKING:
    from dearmpi.plan.data.plan import Plan
    from dearmpi.plan.model.cost import Costs
    from dearmpi.plan.model.profile import ModelProfile
    from dearmpi.tune.calibration import Calibration


@click.command(short_help="Decide on buckets and their order.")
@click.option(
    "--profile",
    "profile_path",
    type=OUT,
    required=True,
    metavar="FILE",
    help="of `dear-train profile`",
)
@click.option(
    "--calibration",
    "calibration_path",
    type=OUT,
    required=True,
    metavar="FILE",
    help="of `dear-train calibrate`",
)
@click.option(
    "--world-size",
    type=int,
    metavar="N",
    help="ranks that will follow it  [default: those that calibrated]",
)
@click.option(
    "--samples-per-rank",
    type=click.IntRange(min=1),
    metavar="N",
    help="samples per rank and micro-batch of the run; needed with a profile of another number of "
    "ranks, which must have as many",
)
@click.option(
    "--eager/--no-eager",
    default=True,
    show_default=True,
    help="buckets are updated during backprop, as dear-train run does where it does not clip "
    "(tasks bytes-lm and images clip, unless --max-grad-norm is 0)",
)
@engine_option("gather", help="what the run gathers")
@click.option(
    "--gradient-accumulation-steps",
    "micro_batches",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="micro-batches per optimizer step of the run; the profile is of one of them",
)
@engine_option("comm_dtype", help="in what the run sends fp32; the calibration is without")
@engine_option("compress", help="how the run compresses; the calibration has measured it")
@density_option()
@click.option("--out", type=OUT, metavar="FILE", help="write the plan there, as JSON")
@picture_option(help="draw the iteration that it is simulated to take")
def plan(
    profile_path: Path,
    calibration_path: Path,
    world_size: int | None,
    samples_per_rank: int | None,
    eager: bool,
    gather: Gather,
    micro_batches: int,
    comm_dtype: CommDtype,
    compress: Compress,
    density: float | None,
    out: Path | None,
    picture_path: Path | None,
) -> int:
    """Decide which parameters share a bucket and in which order buckets travel, before training:

    \b
      mpirun -n 4 dear-train profile --task digits --out profile.json
      mpirun -n 4 dear-train calibrate --out link.json
      dear-train plan --profile profile.json --calibration link.json \\
          --out plan.json
      mpirun -n 4 dear-train run --task digits --plan plan.json

    Needs no MPI. `dear-train run --plan auto` does all of this while it trains.
    """
    from dearmpi.plan.model.profile import read_profile
    from dearmpi.plan.search.planner import make_plan
    from dearmpi.tune.calibration import read_calibration

    check_apart(
        {"--out": out, "--picture": picture_path},
        {"--profile": profile_path, "--calibration": calibration_path},
    )
    check_writable(out)
    check_picture(picture_path)
    config = EngineConfig(comm_dtype=comm_dtype, gather=gather, compress=compress, density=density)
    console = Console(speaks=True, needed=True)
    profile, calibration = read_profile(profile_path), read_calibration(calibration_path)
    if calibration.flaw is not None:
        raise MeasurementError(f"{calibration_path}: {calibration.flaw}", code="measurement-flawed")
    costs = _costs(calibration, world_size)
    _check_samples(profile_path, profile, costs.world_size, samples_per_rank)
    costs = costs.sent_as(comm_dtype, profile.workload.params())
    costs = replace(costs, codec=calibration.codec_for(config, str(calibration_path)))
    made = make_plan(profile, costs, world_size=costs.world_size, eager=eager, gather=gather)
    origin = f"{made.origin}, {_describe_conditions(profile, calibration, comm_dtype)}"
    origin += "" if costs.codec is None else f", --compress {costs.codec.about}"
    made = replace(made, origin=origin).over(micro_batches)
    console.say(*describe_other_version(f"the profile {profile_path}", profile.version))
    console.say(*describe_other_version(f"the calibration {calibration_path}", calibration.version))
    console.say(*describe_costs(costs), made.describe())
    if out is not None:
        write_file(out, made.to_json())
        console.say(f"wrote {out}")
    if picture_path is not None:
        _draw(made, profile, costs, micro_batches=micro_batches, path=picture_path)
        console.say(f"wrote {picture_path}")
    return 0


def _costs(calibration: Calibration, world_size: int | None) -> Costs:
    """What was measured, for ``world_size`` ranks, or as many as measured it."""
    from dearmpi.plan.model.cost import MOST_RANKS

    if world_size is not None and not 2 <= world_size <= MOST_RANKS:
        raise ConfigError(
            f"--world-size is {world_size}; it must be from 2, since one sends nothing, to "
            f"{MOST_RANKS}",
            code="out-of-range",
        )
    return calibration.costs.at(world_size or calibration.world_size).with_typical_overheads()


def _check_samples(path: Path, profile: ModelProfile, num_ranks: int, given: int | None) -> None:
    """Raise ConfigError where the layers would take other times than ``profile`` has: a run divides
    its batch by its ranks, so the same flags give other times on other numbers of them.
    """
    measured = profile.workload.batch_size
    samples = count_text(measured, "sample")
    if given is not None and given != measured:
        raise ConfigError(
            f"--samples-per-rank is {given}, but {path} was measured with {samples} per rank and "
            "micro-batch; profile with as many as the run will have",
            code="samples-misfit",
        )
    if given is None and profile.world_size != num_ranks:
        raise ConfigError(
            f"{path} was measured on {count_text(profile.world_size, 'rank')}, and the plan is for "
            f"{num_ranks}, among which a run divides its batch; profile on {num_ranks}, or, if "
            f"each of them will have {samples} per micro-batch, as this profile, give "
            f"--samples-per-rank {measured}",
            code="samples-misfit",
        )


def _draw(
    plan: Plan, profile: ModelProfile, costs: Costs, *, micro_batches: int, path: Path
) -> None:
    """The iteration that ``plan`` is simulated to take."""
    from dearmpi.plan.simulate.timeline import simulate
    from dearmpi.report.draw.tracks import draw_plan

    layout = plan.layout(profile.workload.params(), costs.world_size)
    timeline = simulate(profile, layout, plan.conduct, costs)
    write_picture(path, draw_plan(plan, timeline, micro_batches=micro_batches))


def _describe_conditions(
    profile: ModelProfile, calibration: Calibration, comm_dtype: CommDtype
) -> str:
    """What its prediction holds for, and a run may have otherwise: it tells this of its plan."""
    return (
        f"{count_text(profile.workload.batch_size, 'sample')} per rank and micro-batch, "
        f"{calibration.algorithm} reduce-scatters, --comm-dtype {comm_dtype}"
    )


def describe_costs(costs: Costs) -> list[str]:
    """Lines: what the plan is judged by beside the layers' times."""
    halves = (("reduce-scatter", costs.reduce_scatter), ("all-gather", costs.all_gather))
    fits = ", ".join(
        f"{name} {link.alpha_s * 1e3:.3f} ms + {link.beta_s_per_byte * 1e9:.3f} ns per byte"
        for name, link in halves
    )
    seen = all(link.beta_s_per_byte for _, link in halves)
    return [
        f"{count_text(costs.world_size, 'rank')}: {fits}{'' if seen else f'; {NO_TIME_PER_BYTE}'}",
        f"each bucket: update {costs.update_s * 1e3:.3f} ms, main thread "
        f"{costs.main_thread_s * 1e3:.3f} ms",
    ]
