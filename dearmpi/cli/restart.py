"""dear-train restart: an mpirun that starts again on the hosts that are left when one is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import click

from dearmpi.cli.endings import complain
from dearmpi.cli.launch_line import JOB, START, LaunchLine, read_launch_line
from dearmpi.cli.requeue import EXIT_PREEMPTED, WarningSignals
from dearmpi.cli.run import read_sources, run
from dearmpi.errors import ConfigError
from dearmpi.plan.data.fields import regular_file
from dearmpi.train.settings.settings import RunSettings
from dearmpi.train.settings.sources import merge

# A communication failure, a rank killed under MPICH, and a launcher that lost a host.
_LOST = (8, 9, 255)
# Signals that have ended a rank, as MPICH's launcher returns them: SIGABRT, by which a transport
# ends ranks that were reading from a killed one, and SIGSEGV. The first is a CheckpointError's as
# well, which no start survives: it counts where this start has saved.
_ABORTED = (6, 11)
_SIGNALLED = 128  # and more: a signal ended a rank or the launcher
_INTERRUPTED = 128 + signal.SIGINT
_SOON_S = 10.0  # in which a job that trains hardly ends
_PROBE_S = 20.0  # how long a host may take to start a program
_MOST_PROBES = 64  # at a time
_OF_THIS_PACKAGE = ("dear-train", "dearmpi", "dearmpi.cli.main")


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="Run mpirun; restart it without lost hosts.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    metavar="N",
    help="restarts in a row without a new checkpoint after which it gives up",
)
@click.option(
    "--run",
    "run_folder",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="a script's run folder, in which checkpoints are looked for; that of dear-train run is "
    "known",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def restart(command: tuple[str, ...], max_restarts: int, run_folder: Path | None) -> int:
    """Run COMMAND, an mpirun or srun with its options and program. If a rank is killed, a host is
    lost or communication fails, start it again on the hosts that answer, each with its ranks.
    The program must resume by itself, and the batch size then stays what it was.

    SIGUSR1 and SIGTERM are passed on as SIGUSR1. Any other exit code is returned as it is.

    \b
      dear-train restart mpirun -n 8 -hosts n0,n1,n2,n3 \\
          dear-train run --task digits --name a --resume auto
      dear-train restart --run runs/a mpirun -n 8 -f hosts python script.py
    """
    line = read_launch_line(command, os.environ)
    watched = _watched_folder(line.program, run_folder)
    with WarningSignals() as warnings:
        return _Restarts(line, watched, max_restarts, warnings).run()


@dataclass(slots=True)
class _Restarts:
    """Starts of ``line``, the first of them as it was given.

    folder: whose file ``latest`` names the newest checkpoint; None if it is not known.
    """

    line: LaunchLine
    folder: Path | None
    max_restarts: int
    warnings: WarningSignals

    def run(self) -> int:
        """Start until it ends otherwise than by a loss; returns the last exit code."""
        words: Sequence[str] = self.line.given
        job, num_starts, num_vain, longest_s = uuid.uuid4().hex, 0, 0, 0.0
        while True:
            before, start_s = self._newest(), time.monotonic()
            environment = os.environ | {JOB: job, START: str(num_starts)}
            code = self.warnings.run(words, environment)
            has_saved = self._newest() != before
            may_be_aborted = self.line.kind == "hydra" and has_saved and code in _ABORTED
            if not (_is_lost(code) or may_be_aborted) or self.warnings.came:
                return code
            took_s = time.monotonic() - start_s
            how = f"ended with {code} after {took_s:.0f} s"
            num_vain, longest_s = (0, 0.0) if has_saved else (num_vain, max(longest_s, took_s))
            if num_vain == self.max_restarts:
                complain(f"error: {how}; {self._describe_limit(longest_s)}")
                return code
            hosts = self._answering()
            if self.warnings.came:
                complain(f"{how}, and a stop was asked for; start again to go on")
                return EXIT_PREEMPTED
            if self.line.ranks and not hosts:
                complain(
                    f"error: {how}, and none of {len(self.line.ranks)} hosts answers; start the "
                    "same command again when they are back, to go on from the last checkpoint"
                )
                return code
            num_starts, num_vain = num_starts + 1, num_vain + 1
            words = self.line.on(hosts) if self.line.ranks else words
            complain(f"{how}; {self._describe(hosts)}, start {num_starts + 1}")

    def _newest(self) -> str | None:
        """The newest checkpoint's name; None where there is none or the folder is not known."""
        try:
            return None if self.folder is None else regular_file(self.folder / "latest").read_text()
        except (OSError, UnicodeDecodeError):
            return None

    def _answering(self) -> list[str]:
        """Hosts on which a program starts; asked all at once."""
        hosts = list(self.line.ranks)
        if not hosts:
            return []
        with ThreadPoolExecutor(min(_MOST_PROBES, len(hosts))) as threads:
            answers = threads.map(lambda host: _answers(self.line.probe(host)), hosts)
        return [host for host, answer in zip(hosts, answers, strict=True) if answer]

    def _describe(self, hosts: Sequence[str]) -> str:
        ranks = self.line.ranks
        if not ranks:
            return "going on with the same command"
        gone = [host for host in ranks if host not in hosts]
        numbers = f"{sum(ranks[host] for host in hosts)} of {sum(ranks.values())} ranks"
        if not gone:
            return f"all {len(ranks)} hosts answer: going on with {numbers}"
        return f"no answer from {', '.join(gone)}: going on with {numbers}"

    def _describe_limit(self, longest_s: float) -> str:
        """longest_s: of the starts that brought no new checkpoint."""
        tried = f"{self.max_restarts} restarts in a row brought no new checkpoint"
        if longest_s < _SOON_S:
            return (
                f"{tried}, and no start took {_SOON_S:.0f} s; find out by the command alone, "
                "without restart, why it ends so soon"
            )
        if self.folder is None:
            return f"{tried} that is known of; name the script's run folder by --run"
        return f"{tried} in {self.folder}; save more often, or find what ends the job"


def _is_lost(code: int) -> bool:
    return code in _LOST or code >= _SIGNALLED and code != _INTERRUPTED


def _answers(command: Sequence[str]) -> bool:
    """Whether ``command`` ends well within its time."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as probe:
        try:
            return probe.wait(_PROBE_S) == 0
        except subprocess.TimeoutExpired:
            os.killpg(probe.pid, signal.SIGKILL)
            return False


def _watched_folder(program: Sequence[str], given: Path | None) -> Path | None:
    """The run folder of ``dear-train run``, else ``given``. Raises ConfigError where a start again
    would not go on with the same run.
    """
    arguments = _arguments_of_run(program)
    if arguments is None:
        return given
    if given is not None:
        raise ConfigError(
            f"--run is {given}, but dear-train run names its own folder; leave out --run",
            code="settings-contradict",
        )
    parameters = dict(run.make_context("dear-train run", list(arguments)).params)
    config = parameters.pop("config")
    chosen = merge(read_sources(parameters, os.environ, config))
    if chosen.get("resume") != "auto" or chosen.get("name") is None:
        raise ConfigError(
            f"resume is {chosen.get('resume')!r} and name {chosen.get('name')!r}, so that a second "
            "start would not go on with the run; give --name NAME and --resume auto",
            code="resume-unclear",
        )
    return Path(chosen.get("run_folder", RunSettings().run_folder), chosen["name"])


def _arguments_of_run(program: Sequence[str]) -> Sequence[str] | None:
    """What follows ``dear-train run``; None if ``program`` is another."""
    for index, word in enumerate(program[:-1]):
        if os.path.basename(word) in _OF_THIS_PACKAGE and program[index + 1] == "run":
            return program[index + 2 :]
    return None
