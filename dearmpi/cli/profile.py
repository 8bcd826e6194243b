"""dear-train profile: how long each layer of a task's model computes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dearmpi.cli.console import Console
from dearmpi.cli.measurement import OUT, check_apart, check_place, write
from dearmpi.cli.run import carry_out_together, read_sources
from dearmpi.cli.settings import RunCommand, setting_options
from dearmpi.errors import ConfigError
from dearmpi.train.settings.settings import PLANNING, SETTINGS
from dearmpi.train.settings.sources import without

if TYPE_CHECKING:
    from dearmpi.cli.rank_log import RankLog
    from dearmpi.comm.world import World
    from dearmpi.plan.model.profile import ModelProfile
    from dearmpi.train.settings.sources import Source

_HEADER = ("layer", "tensors", "MB", "feed-forward ms", "backprop ms", "ready ms")
_MOST_ROWS = 40
_OF_A_RUN = (
    *("run_folder", "name", "resume", "max_time_s", "checkpoint_interval", "keep"),
    *("log_interval", "eval_interval", "tensorboard", "trace"),
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
        from dearmpi.bench.layer_times import measure_layers
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
    short_help="Measure how long each layer of a model computes.",
)


def check_flags(given: Mapping[str, object]) -> None:
    """Raise ConfigError for a flag of a run that changes nothing about a profile."""
    for name in _WITHOUT_EFFECT:
        if given[name] not in (None, ()):
            raise ConfigError(
                f"--{SETTINGS[name].flag} has no effect on a profile, which trains for "
                "--num-warmup-batches and --num-batches steps and keeps nothing; leave it out"
            )
    if given["plan"] in PLANNING:
        raise ConfigError(
            f"--plan {given['plan']} has no effect on a profile, which is over before a plan is "
            "found; leave it out, or name the file of one"
        )


def check_lengths(num_warmup: int, num_batches: int) -> None:
    """Raise ConfigError where there is nothing to measure."""
    if num_warmup < 0 or num_batches < 1:
        raise ConfigError(
            f"{num_warmup} warm-up batches and {num_batches} that count; at least 0 and 1 are "
            "needed"
        )


def describe_profile(profile: ModelProfile) -> list[str]:
    """Lines: what was measured, and a table of the layers, or of the slowest if there are many."""
    from dearmpi.bench.table import align
    from dearmpi.report.draw.unit import count_text

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
