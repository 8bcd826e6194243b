"""dear-train doctor: what is wrong with this machine, its MPI and its network."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dearmpi.cli.console import Console
from dearmpi.cli.endings import complain, end_run, is_first_process, process_name, rank_log
from dearmpi.cli.flags import PATH, check_writable, write_file
from dearmpi.comm.process import is_launched

if TYPE_CHECKING:
    from dearmpi.comm.world import World
    from dearmpi.train.settings.settings import RunSettings

_STANDARD_OUTPUT = Path("-")


@click.command(short_help="Check the installation, and state cures.")
@click.option(
    "--run-folder",
    type=PATH,
    metavar="ROOT",
    help="the folder in which runs are to be kept; default: that of dear-train run",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    metavar="FILE",
    help="write everything there, for a bug report; - prints it instead of the lines",
)
def doctor(run_folder: Path | None, json_path: Path | None) -> int:
    """Check what training stands on, and say what cures what is wrong:

    \b
      dear-train doctor
      mpirun -n 4 dear-train doctor

    Start it as training is to be started. It looks at MPI, launcher, cores, devices, network and
    disk, with the run folder and threads that `dear-train run` would take, for a few seconds.
    Exit code: 0 unless a check fails; then the one that `dear-train run` would end with.
    """
    from dearmpi.doctor.finding import describe, exit_code, summarize

    console = Console(speaks=is_first_process() and json_path != _STANDARD_OUTPUT, needed=True)
    try:
        import_module("dearmpi.cli.run_session")  # all that a run needs
        from dearmpi.doctor.examination import Examination, examine, probe_devices
        from dearmpi.doctor.finding import cuda_devices
        from dearmpi.doctor.launcher import find_mpirun, open_world
    except Exception as error:  # libraries with compiled parts fail at import in many ways
        return _tell_broken_packages(error, console, json_path)
    verdicts = probe_devices() if is_first_process() else ()
    mpirun = None if is_launched(os.environ) else find_mpirun()
    world, joined = open_world(probing=bool(cuda_devices()))
    examination = Examination(tell=lambda finding: console.say(*describe(finding)))
    with rank_log(speaks=False) as log:
        try:
            _check_place(world, json_path)
            try:
                settings = _read_settings(world, run_folder)
                examine(
                    examination,
                    world,
                    settings,
                    joined=joined,
                    verdicts=verdicts,
                    mpirun=mpirun,
                )
                console.say("", summarize(examination.findings))
            except BaseException as error:  # also where somebody has lost patience
                examination.error = str(error) or type(error).__name__  # a bug report needs it most
                raise
            finally:
                _write(json_path, examination.as_plain())
            # Rank 0 alone has written to the disk; what it found is what counts.
            return int(world.broadcast_text(str(exit_code(examination.findings))))
        except (Exception, KeyboardInterrupt) as error:
            return end_run(world, error, log)


def _check_place(world: World, path: Path | None) -> None:
    """Raise AgreedError where rank 0 cannot write there (collective): checks take a while."""
    from dearmpi.train.ranks.agreement import together

    with together(world, root_only=True):
        if is_first_process() and path != _STANDARD_OUTPUT:
            check_writable(path)


def _read_settings(world: World, run_folder: Path | None) -> RunSettings:
    """Those that ``dear-train run`` would begin with, beside this flag (collective).

    Raises AgreedError where it would refuse the environment, or the file that is named there.
    """
    from dearmpi.cli.run import read_sources
    from dearmpi.train.ranks.agreement import together
    from dearmpi.train.settings.sources import CONFIG_VARIABLE, before_task

    given = {} if run_folder is None else {"run_folder": str(run_folder)}
    with together(world):
        return before_task(read_sources(given, os.environ, os.environ.get(CONFIG_VARIABLE) or None))


def _tell_broken_packages(error: Exception, console: Console, json_path: Path | None) -> int:
    """Report that nothing else can be checked; the exit code."""
    from dearmpi.doctor.finding import describe, exit_code, fail

    finding = fail(
        "packages",
        f"what training needs cannot be imported: {type(error).__name__}: {error}",
        cure="install it anew, from where it came: pip install --force-reinstall PATH",
    )
    console.say(*describe(finding))
    if not is_first_process():  # the others wait for this rank, and cannot tell why
        complain("\n".join(describe(finding)), prefix=f"{process_name()} ")
    code = exit_code([finding])
    _write(json_path, {"findings": [asdict(finding)], "exit_code": code})
    return code


def _write(path: Path | None, plain: Mapping[str, Any]) -> None:
    """Write ``plain`` as JSON to ``path``, if there is one, once for all ranks."""
    if path is None or not is_first_process():
        return
    text = json.dumps(plain, indent=1, default=str) + "\n"
    if path == _STANDARD_OUTPUT:
        click.echo(text, nl=False)
        return
    write_file(path, text)
