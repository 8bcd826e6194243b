"""The commands of dear-train, and how their errors end it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

import dearmpi
from dearmpi.cli.bench import bench
from dearmpi.cli.doctor import doctor
from dearmpi.cli.endings import complain, exit_code
from dearmpi.cli.federate import federate
from dearmpi.cli.flags import CONTEXT
from dearmpi.cli.interrupts import INTERRUPTED
from dearmpi.cli.measure import calibrate, profile
from dearmpi.cli.plan import plan
from dearmpi.cli.requeue import requeue
from dearmpi.cli.restart import restart
from dearmpi.cli.run import run
from dearmpi.cli.run_output import checkpoint, compare, report, runs, trace
from dearmpi.cli.simulate import simulate
from dearmpi.cli.slurm import slurm
from dearmpi.errors import ConfigError, DearError


@click.group(context_settings=CONTEXT)
@click.version_option(dearmpi.__version__, prog_name="dear-train", message="%(prog)s %(version)s")
def group() -> None:
    """Train PyTorch models over MPI, with communication hidden behind computation."""


group.add_command(run)
group.add_command(bench)
group.add_command(simulate)
group.add_command(calibrate)
group.add_command(profile)
group.add_command(plan)
group.add_command(federate)
group.add_command(runs)
group.add_command(compare)
group.add_command(report)
group.add_command(checkpoint)
group.add_command(trace)
group.add_command(doctor)
group.add_command(requeue)
group.add_command(restart)
group.add_command(slurm)


def carry_out(arguments: Sequence[str] | None) -> int:
    """Run the command line; returns the exit code."""
    try:
        code = group.main(
            None if arguments is None else list(arguments),
            prog_name="dear-train",
            standalone_mode=False,
        )
    except click.ClickException as error:
        return _refuse(error)
    except DearError as error:
        complain(f"error: {error.with_code()}")
        return exit_code(error)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the output has left; Python must not try to flush to it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return int(code or 0)


def _refuse(error: click.ClickException) -> int:
    """Tell of a command line that click refuses, once for all ranks."""
    from dearmpi.comm.process import announced_size

    if announced_size(os.environ) <= 1:
        error.show()
        return error.exit_code
    from dearmpi.cli.run import run_together

    context = getattr(error, "ctx", None)
    hint = "" if context is None else f" See {context.command_path} --help"

    def refuse() -> NoReturn:
        raise ConfigError(f"{error.format_message()}{hint}", code="unknown-command")

    return run_together(refuse)
