"""dear-train requeue: a command inside a SLURM job, which goes back into the queue if it stopped
with a checkpoint.

A batch script ends with it. SLURM's warning reaches the script alone (``--signal=B:USR1@120``), so
it is passed on; mpirun, srun and ``dear-train run`` take it as a request to save and stop.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

import click

from dearmpi.cli.endings import complain
from dearmpi.errors import ConfigError

EXIT_PREEMPTED = 75  # as in train.stop, which would bring torch in
_WARNINGS = (signal.SIGUSR1, signal.SIGTERM)


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="In a SLURM job, queue it again on exit code 75.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def requeue(command: tuple[str, ...]) -> int:
    """Run COMMAND inside a SLURM job, such as mpirun with its arguments. SIGUSR1 and SIGTERM are
    passed on to it as SIGUSR1. If it then ends with 75 (stopped after a checkpoint), the job goes
    back into the queue under the same number; a job that is being cancelled does not.

    \b
      dear-train requeue mpirun -n 8 dear-train run --name a --resume auto
    """
    with _ignoring_warnings():
        with WarningSignals() as warnings:
            code = warnings.run(command)
        if code == EXIT_PREEMPTED:
            complain(put_back(os.environ))
    return code


@contextmanager
def _ignoring_warnings() -> Iterator[None]:
    """Inside, warnings end neither this process nor the commands of SLURM that put the job back: at
    the time limit SLURM sends SIGTERM to all that the job runs. COMMAND is no such child:
    ``WarningSignals`` has the usual handling of both.
    """
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _WARNINGS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class WarningSignals:
    """SIGUSR1 and SIGTERM, passed on as SIGUSR1 to a command; a context manager.

    came: whether one has come.
    """

    def __init__(self) -> None:
        self.came = False
        self._child: subprocess.Popen[bytes] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._forward) for number in _WARNINGS}
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
        """Run ``command``; returns its exit code as a shell would see it.

        Raises ConfigError where it cannot be started.
        """
        try:
            self._child = subprocess.Popen(command, env=environment)
        except OSError as error:
            raise ConfigError(
                f"cannot start {command[0]}: {error.strerror}; give a command and its arguments, "
                "such as mpirun -n 8 dear-train run",
                code="command-not-started",
            ) from error
        if self.came:
            self._child.send_signal(signal.SIGUSR1)
        try:
            code = self._child.wait()
        finally:
            self._child = None
        return code if code >= 0 else 128 - code

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        if self._child is not None:
            self._child.send_signal(signal.SIGUSR1)


def put_back(environment: Mapping[str, str]) -> str:
    """Put this SLURM job back into the queue, unless it is being cancelled; returns what to tell.

    While it is being cancelled SLURM calls it COMPLETING. So it does at the time limit, but then
    gives that as the reason.
    """
    number = environment.get("SLURM_JOB_ID")
    if not number:
        return "stopped after a checkpoint; this is no SLURM job: start it again to go on"
    found = find_job(number)
    if found is None:  # nor does it tell of a job that has ended, whose shell lives on
        by_hand = f"put it back with: scontrol requeue {number}"
        return f"SLURM does not tell the state of job {number}; {by_hand}"
    job, state = found
    by_hand = f"put it back with: scontrol requeue {job}"
    if state not in ("RUNNING None", "COMPLETING TimeLimit"):
        return f"job {job} is {state.split()[0]}, so it is not queued again; {by_hand}"
    if _ask("scontrol", "requeue", job) is None:
        return f"SLURM did not queue job {job} again; {by_hand}"
    return f"job {job} is queued again, to go on from its checkpoint"


def find_job(number: str) -> tuple[str, str] | None:
    """What SLURM calls the job ``number``, and its state with the reason; None if it knows none.

    A job of an array is called by its index, as its number may stand for the whole array; of that
    squeue prints every job. Variables do not tell: SLURM_ARRAY_JOB_ID is handed on to jobs that are
    submitted from inside an array.
    """
    printed = _ask("squeue", "--noheader", f"--jobs={number}", "--format=%A %i %T %r")
    for line in (printed or "").splitlines():
        own_number, job, state = line.split(maxsplit=2)
        if own_number == number:
            return job, state
    return None


def _ask(*command: str) -> str | None:
    """What a command of SLURM prints; None, and its complaint, where it fails.

    SQUEUE_PARTITION and the like, with which users see less of the queue, would hide the job.
    """
    filtered = {n: value for n, value in os.environ.items() if not n.startswith("SQUEUE_")}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            env=filtered,
        )
    except OSError as error:
        complain(f"{command[0]}: {error.strerror}")
        return None
    if done.returncode:
        complain(f"{command[0]}: {done.stderr.strip()}")
        return None
    return done.stdout.strip()
