"""Runs pytest on several ranks; a deadlock ends with the Python stacks of all of them.

    python tests/launch.py --ranks 4 [--python .venv-openmpi/bin/python] [--forks]
                           [pytest's arguments]

--forks: ranks are forks of a process that has torch loaded, which saves 5 s of computation each.
They then share the seed of hashes: what depends on the order of a set shows on real ranks alone.

Exit status: the launcher's, 124 when a limit ended the run, 125 when processes were left over.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
if __package__ is None or not __package__:  # run as a file
    sys.path.insert(0, str(ROOT))

from tests.forks import forked  # noqa: E402
from tests.job import TIMES_VARIABLE, Job  # noqa: E402
from tests.roster import FOLDER_VARIABLE, Entry, collect_stacks, read_entry  # noqa: E402

_SLOW_FACTOR = 5
_LOOK_S, _MOST_LOOK_S = 0.1, 10.0


def main() -> int:
    """Run, watch, report."""
    options, arguments = _parse()
    signal.signal(signal.SIGTERM, _terminate)
    command = [options.python, "-m", "pytest", "-o", "faulthandler_timeout=0"]
    command += ["-p", "no:cacheprovider", *(arguments or ["tests/mpi"])]
    with (
        tempfile.TemporaryDirectory(prefix="dear-roster-") as folder,
        Job(
            forked(command) if options.forks else command,
            ranks=options.ranks,
            limit_s=options.limit,
            python=options.python,
            folder=ROOT,
            environment=_passed_on() | {FOLDER_VARIABLE: folder},
            shown=True,
        ) as job,
    ):
        return _watch(job, Path(folder), options)


def _passed_on() -> dict[str, str]:
    """What the ranks' own pytest is to know, and what no job inside a test is."""
    times = os.environ.get(TIMES_VARIABLE)
    return {} if times is None else {TIMES_VARIABLE: times}


def _parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--python", type=Path, default=Path(sys.executable))
    parser.add_argument("--forks", action="store_true", help="start ranks as forks")
    parser.add_argument("--limit", type=float, default=300, help="seconds for the whole run")
    parser.add_argument("--test-limit", type=float, default=120, help="seconds for one test")
    parser.add_argument(
        "--end-limit", type=float, default=10, help="seconds until a launcher notes a rank's end"
    )
    return parser.parse_known_args()


def _terminate(number: int, frame: object) -> NoReturn:
    """Leave through the context managers, which end the job."""
    raise SystemExit(128 + number)


def _watch(job: Job, folder: Path, options: argparse.Namespace) -> int:
    seen_s = whole_s = time.monotonic()
    paused_s = 0.0
    while job.is_running():
        time.sleep(_LOOK_S)
        before_s, seen_s = seen_s, time.monotonic()
        if seen_s - before_s > _MOST_LOOK_S:  # the whole machine stood still
            paused_s += seen_s - before_s
        entries = _read_entries(folder, options.ranks)
        problem = _find_problem(job, entries, options, paused_s=paused_s)
        if problem is not None:
            stacks = collect_stacks(folder, list(range(options.ranks)))
            _say(f"TIMEOUT on {options.ranks} ranks: {problem}\n{stacks}")
            job.end(timed_out=True)
            return 124
        if not any(entry.is_gone() for entry in entries):
            whole_s = seen_s
        elif seen_s - whole_s > options.end_limit:
            break  # the launcher has not noticed, as where a child of the rank lives on
    is_unnoticed = job.is_running()
    ended = job.end()
    if ended.returncode or is_unnoticed:
        lines = [f"FAILED on {options.ranks} ranks, exit status {ended.returncode}"]
        for entry in _read_entries(folder, options.ranks):
            if entry.running:
                lines.append(f"rank {entry.rank} ended in {entry.running}")
        _say("\n".join(lines))
        return ended.returncode or 1
    elif ended.left_over:
        _say(f"FAILED on {options.ranks} ranks: {ended.left_over} processes had to be killed")
        return 125
    return ended.returncode


def _read_entries(folder: Path, ranks: int) -> list[Entry]:
    entries = [read_entry(folder, rank) for rank in range(ranks)]
    return [entry for entry in entries if entry is not None]


def _find_problem(
    job: Job, entries: list[Entry], options: argparse.Namespace, *, paused_s: float
) -> str | None:
    if job.duration_s > options.limit:
        return f"the whole run has taken more than {options.limit:g} s"
    for entry in entries:
        limit_s = options.test_limit * (_SLOW_FACTOR if entry.slow else 1)
        if entry.running and time.monotonic() - entry.since_s > limit_s + paused_s:
            return f"rank {entry.rank} has been in {entry.running} for more than {limit_s:g} s"
    return None


def _say(text: str) -> None:
    print(f"\n===== {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
