"""dear-train profile: how long each layer of a task's model computes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dearmpi.cli.console import Console
from dearmpi.cli.options import RunCommand, setting_options
from dearmpi.cli.output_files import OUT, check_apart, check_place, write
from dearmpi.cli.run import carry_out_together, read_sources
from dearmpi.errors import ConfigError
from dearmpi.train.settings.settings import PLANNING, SETTINGS
from dearmpi.train.settings.sources import without

if TYPE_CHECKING:
    from dearmpi.cli.ranks import RankLog
    from dearmpi.comm.world import World
    from dearmpi.train.settings.sources import Source

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
        from dearmpi.bench.layer_times import describe_profile, measure_layers
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
