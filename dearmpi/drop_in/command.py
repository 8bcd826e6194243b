"""``python -m dearmpi [options] SCRIPT [arguments]``: the script finds torch's names served."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from typing import get_args

from dearmpi.config import CommDtype, Gather, ScheduleName
from dearmpi.drop_in.serving import Choices
from dearmpi.drop_in.start import serve_scripts

_USAGE = "mpirun -n N python -m dearmpi [options] (SCRIPT | -m MODULE) [arguments of the script]"
_EPILOG = "Options before SCRIPT are dearmpi's; all that follows is the script's."


def main(given: Sequence[str]) -> int:
    """Run the script that ``given`` names, as Python would; returns the exit status."""
    options, target = _parse(given)
    if not os.path.exists(target[0]) and not options.m:
        print(f"dearmpi: error: there is no script {target[0]!r}", file=sys.stderr)
        return 2
    serve_scripts(Choices(options.schedule, options.gather, options.comm_dtype))
    sys.argv = list(target)
    if options.m:
        sys.path[0] = os.getcwd()
        runpy.run_module(target[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(target[0]))
        runpy.run_path(target[0], run_name="__main__")
    return 0


def _parse(given: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Options, and the script or module with its own arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m dearmpi",
        usage=_USAGE,
        description="Run a script written for DistributedDataParallel, with dearmpi in its place.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    default = Choices()
    for flag, choices, value, about in (
        ("--schedule", get_args(ScheduleName), default.schedule, "when collectives travel"),
        ("--gather", get_args(Gather), default.gather, "what is gathered after each step"),
        ("--comm-dtype", get_args(CommDtype), default.comm_dtype, "precision on the wire"),
    ):
        parser.add_argument(flag, choices=choices, default=value, help=f"{about}; default: {value}")
    parser.add_argument("-m", action="store_true", help="run a module, as python -m does")
    parser.add_argument("target", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if not options.target:
        parser.error("name a script, or a module after -m")
    return options, options.target
