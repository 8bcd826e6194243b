"""dear-train run: from the command line to the summary."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dearmpi.cli.endings import is_first_process, on_ranks
from dearmpi.cli.flags import RunCommand, setting_options
from dearmpi.cli.interrupts import loading
from dearmpi.errors import ConfigError
from dearmpi.train.settings.sources import Source, make_source, merge, read_environment, read_file

if TYPE_CHECKING:
    from dearmpi.cli.endings import RankLog
    from dearmpi.comm.watchdog.watchdog import StallLimits
    from dearmpi.comm.world import World
    from dearmpi.train.ranks.stop import StopRequest

ReadSources = Callable[[], Sequence[Source]]
CarryOut = Callable[["World", Sequence[Source], "RankLog"], int]

EPILOG = """Each flag may also be given in the environment (--batch-size as
DEAR_TRAIN_BATCH_SIZE) or in the file (batch_size: 32). A flag wins over the environment, the
environment over the file, the file over the checkpoint that is resumed, and that over what the
task recommends.

Exit codes: 0 done, 1 failure, 2 usage, 3 launch, 4 ranks differ, 5 data, 6 checkpoint,
7 loss not finite, 8 communication, 75 stopped by SIGUSR1, SIGTERM or --max-time after a
checkpoint, 130 interrupted by Ctrl-C without one."""


def _run(config: str | None, **given: object) -> int:
    """Train a model, alone or on several ranks:

    \b
      dear-train run --task digits
      mpirun -n 4 dear-train run --task digits --epochs 20
    """
    return run_together(lambda: read_sources(given, os.environ, config))


run = RunCommand(
    "run",
    callback=_run,
    params=list(setting_options()),
    help=_run.__doc__,
    epilog=EPILOG,
    short_help="Train a model.",
)


def read_sources(
    given: Mapping[str, object], environment: Mapping[str, str], config: str | None
) -> list[Source]:
    """What the user chose, by flags, environment and file, those that win first."""
    check_config(config)
    flags = {name: value for name, value in given.items() if value not in (None, ())}
    sources = [make_source("flag", flags), read_environment(environment)]
    if config is not None:
        sources.append(read_file(Path(config)))
    return sources


def check_config(config: str | None) -> None:
    """Raise ConfigError for a name that names no file, as of a shell's variable that is not set."""
    if config == "":
        raise ConfigError("--config is empty; name a file, or leave it out", code="malformed-value")


def run_together(read: ReadSources) -> int:
    """Connect the ranks and train with the settings that ``read`` finds, to the end or to a stop by
    a signal. Returns the exit code.
    """
    from dearmpi.train.ranks.stop import StopRequest

    with StopRequest() as stop:

        def train(world: World, sources: Sequence[Source], log: RankLog) -> int:
            from dearmpi.cli.run_session import run_session

            return run_session(world, sources, stop=stop, log=log, command=sys.argv)

        return carry_out_together(read, train, stop=stop)


def carry_out_together(
    read: ReadSources, carry_out: CarryOut, *, stop: StopRequest | None = None
) -> int:
    """Connect the ranks and ``carry_out`` something with the settings that ``read`` finds; where it
    raises ConfigError, that is told once. Returns the exit code.

    stop: what notes the signals that ask for a stop; without it they end the process.
    """
    failure: ConfigError | None = None
    sources: Sequence[Source] = ()
    chosen: Mapping[str, Any] = {}
    try:
        sources = read()
        chosen = merge(sources)
    except ConfigError as error:
        failure = error

    def meet() -> World:
        # On all ranks at once, before MPI: the others would wait there for rank 0, which needs
        # torch to look for devices. Not for settings that are refused.
        with loading():
            if failure is None:
                import_module("torch")
            from dearmpi.comm.lifecycle import connect

        if failure is None:
            _try_devices(chosen)
        world = connect(chosen.get("progress"), stall_limits=_stall_limits(chosen))
        if stop is not None:
            stop.listen()
        return world

    return on_ranks(
        lambda world, log: carry_out(world, sources, log), connect=meet, failure=failure
    )


def _try_devices(chosen: Mapping[str, Any]) -> None:
    """Let rank 0 find out what MPI does on device memory, before it is initialised."""
    from dearmpi.tune.device_probe import probe_devices

    asked = chosen.get("cuda_buffers", "auto")
    if is_first_process() and asked != "staged" and chosen.get("device") != "cpu":
        probe_devices(always=asked == "direct")


def _stall_limits(chosen: Mapping[str, Any]) -> StallLimits:
    """What was chosen of the limits of a wait. The world needs them before the other settings."""
    from dearmpi.comm.watchdog.watchdog import StallLimits

    names = {"stall_warning_s": "warning_s", "stall_abort_s": "abort_s"}
    return StallLimits(**{names[n]: value for n, value in chosen.items() if n in names})
