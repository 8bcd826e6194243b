"""Runs the sections of `bin/test`, those that wait beside those that compute, and sums them up.

    python tests/sections.py [--all] [--set-up-s SECONDS] [SECTION ...]
    python tests/sections.py --torch VERSIONS

Prints each section's output in one piece; the first of those under way prints as it goes. Ends with
the slowest tests and a table. Exit status: 0 if every section passed, 130 if interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NoReturn

ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # run as a file
    sys.path.insert(0, str(ROOT))

from tests.forks import share_server  # noqa: E402
from tests.job import TIMES_VARIABLE  # noqa: E402
from tests.selection import EVERY_TEST, SIZES  # noqa: E402

PARTS = ("lint", "types", "unit", "mpi", "openmpi", "lab", "slurm")
BY_NAME = ("frameworks",)  # run only where they are named
NUM_SLOWEST = 20
_LONGEST = ("tests/unit/engine", "tests/unit/plan")  # first, so that the processes end together
_SCRIPTS = (
    "bin/demo",
    "bin/docs",
    "bin/setup",
    "bin/test",
    "bin/netlab-rsh",
    ".ci/run",
    "tests/slurm/run",
)
_PYTHON = str(ROOT / ".venv" / "bin" / "python")
_FORKING = {".venv": {"unit", "mpi", "lab", "slurm"}, ".venv-openmpi": {"openmpi"}}
_MOST_WAITING = 2
_LOOK_S = 0.1
_LAST_LINES = 60
_CLOSING = re.compile(r"=+ (.*\d+ (?:passed|failed|skipped|errors?|deselected).*?) =+$")


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the tests.

    cores: how many it keeps busy; 0 for one that mostly waits; _MOST_WAITING of them run at a time.
    limit_s: seconds until it is ended. grace_s: seconds it then has to clean up.
    """

    part: str
    name: str
    command: list[str]
    cores: int = 1
    limit_s: float = 600.0
    grace_s: float = 20.0


@dataclass(slots=True)
class Running:
    """A section under way, or one whose output waits to be printed."""

    section: Section
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    started_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0
    told_s: float | None = None  # when it was told to end
    is_announced: bool = False


def list_sections(*, everything: bool) -> list[Section]:
    """All sections, in the order in which they start."""
    marks = ["-m", EVERY_TEST] if everything else []
    long_s = 3000.0 if everything else 1500.0
    choice = "ranks" if everything else "fast"
    color = ["--color=yes"] if sys.stdout.isatty() else []
    pytest = [_PYTHON, "-m", "pytest", "-p", "no:cacheprovider", *color]

    def on_ranks(ranks: int, choice: str, environment: str = ".venv") -> list[str]:
        python = str(ROOT / environment / "bin" / "python")
        launch = [_PYTHON, "tests/launch.py", "--python", python, "--ranks", str(ranks)]
        # Those that start jobs are real processes, and three ranks: their seeds of hashes differ.
        is_real = choice.endswith("jobs") or ranks == 3 and environment == ".venv"
        launch += [] if is_real else ["--forks"]
        limit = ["--limit", f"{long_s - 20:g}"]
        return [*launch, *limit, "tests/mpi", "--choice", choice, *color, *marks]

    files = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/test_*.py"))
    unit = [*pytest, *marks, "--processes=2", *files, *_LONGEST, "tests/unit"]
    second = choice if everything else "second"
    scripts = [*_SCRIPTS, *sorted(str(path) for path in ROOT.glob("slurm/*.sbatch"))]
    shellcheck = [str(ROOT / ".venv/bin/shellcheck"), "--severity=warning", *scripts]
    has_frameworks = ROOT / ".venv-frameworks" / "bin" / "python"
    python = str(has_frameworks) if has_frameworks.exists() else _PYTHON  # which skips them
    frameworks = [python, *pytest[1:], "-o", "faulthandler_timeout=0", "tests/frameworks", *marks]
    mypy = [_PYTHON, "-m", "mypy"]
    ruff = [_PYTHON, "-m", "ruff"]
    worlds = [
        Section("mpi", f"MPICH, {n} rank(s)", on_ranks(n, choice), n, long_s)
        for n in SIZES
        if n != 1
    ]
    return [
        # Of SLURM and of emulated hosts all tests may be skipped; each says why.
        Section("slurm", "SLURM", ["tests/slurm/run", *pytest, *marks], 0, long_s, 110.0),
        Section("mpi", "MPICH, own jobs", on_ranks(1, "jobs"), 0, long_s),
        Section(
            "openmpi",
            "Open MPI, own jobs",
            on_ranks(1, "jobs" if everything else "second-jobs", ".venv-openmpi"),
            0,
            long_s,
        ),
        Section("lab", "emulated hosts", [*pytest, "tests/lab", *marks], 0, 600.0),
        Section("lint", "lint (ruff check)", [*ruff, "check", "."]),
        Section("lint", "format (ruff format)", [*ruff, "format", "--check", "--diff", "."]),
        Section("lint", "scripts (shellcheck)", shellcheck),
        # Ranks wait for each other: beside them unit tests keep the cores busy.
        Section("unit", "unit tests", unit, 2, long_s),
        *worlds[:1],
        Section("types", "types (mypy)", mypy, 1, long_s),  # long, on one core: not at the end
        *worlds[1:],
        Section("openmpi", "Open MPI, 3 ranks", on_ranks(3, second, ".venv-openmpi"), 3, long_s),
        Section("mpi", "MPICH, 1 rank(s)", on_ranks(1, choice), 1, long_s),
        Section("frameworks", "frameworks, 2 ranks", frameworks, 2, 3000.0),
    ]


def list_torch_sections(versions: list[str]) -> list[Section]:
    """Of each version: the covering set and what looks into torch on 2 ranks, and unit tests."""
    sections = []
    for version in versions:
        python = str(ROOT / f".venv-torch-{version}" / "bin" / "python")
        launch = [_PYTHON, "tests/launch.py", "--python", python, "--ranks", "2", "--forks"]
        ranks = [*launch, "--limit", "1480", "tests/mpi", "--choice", "torch"]
        unit = [python, "-m", "pytest", "-p", "no:cacheprovider"]
        unit += ["tests/unit/engine", "tests/unit/drop_in"]
        sections.append(Section("torch", f"torch {version}, 2 ranks", ranks, 2, 1500.0))
        sections.append(Section("torch", f"torch {version}, unit tests", unit, 1, 1500.0))
    return sections


class Runner:
    """Runs sections beside each other, as far as the cores go."""

    def __init__(self, sections: list[Section], folder: Path) -> None:
        self.failed = False
        self._left = list(sections)
        self._folder = folder
        self._under_way: list[Running] = []
        self._ended: list[Running] = []
        self._rows: list[str] = []
        self._last_words: list[str] = []
        # Two more than there are: sections wait as well, for ranks and for processes that start.
        self._cores = max(2, len(os.sched_getaffinity(0)))
        self._places = self._cores + 2

    def run(self) -> None:
        """Run all sections to their ends; print what they print."""
        while self._left or self._under_way:
            self._start_what_fits()
            time.sleep(_LOOK_S)
            for running in list(self._under_way):
                self._look_at(running)
            self._print()

    def stop(self) -> None:
        """Tell the sections under way to end, and wait for them: they clean up after themselves."""
        self._left.clear()
        for running in self._under_way:
            self._tell(running)
        while self._under_way:
            time.sleep(_LOOK_S)
            for running in list(self._under_way):
                self._look_at(running)
        self._print()

    def summary(self) -> str:
        """The end of the output of what failed, since a log may keep only its end, and a table."""
        return "\n".join([*self._last_words, "\n########## Summary", *self._rows])

    def _start_what_fits(self) -> None:
        waiting = sum(running.section.cores == 0 for running in self._under_way)
        free = self._places - sum(self._places_of(running.section) for running in self._under_way)
        for section in list(self._left):
            if section.cores == 0 and waiting < _MOST_WAITING:
                waiting += 1
            elif 0 < self._places_of(section) <= free:
                free -= self._places_of(section)
            else:
                free = free if section.cores == 0 else 0  # the next that computes keeps its place
                continue
            self._left.remove(section)
            self._start(section)

    def _places_of(self, section: Section) -> int:
        return min(section.cores, self._cores)  # more ranks than cores share them

    def _start(self, section: Section) -> None:
        output = tempfile.NamedTemporaryFile(dir=self._folder, delete=False)  # noqa: SIM115
        process = subprocess.Popen(
            section.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            start_new_session=True,
            restore_signals=True,
        )
        self._under_way.append(Running(section, process, open(output.name, "rb")))  # noqa: SIM115
        output.close()

    def _look_at(self, running: Running) -> None:
        now_s = time.monotonic()
        if running.process.poll() is not None:
            running.ended_s = now_s
            self._under_way.remove(running)
            self._ended.append(running)
        elif running.told_s is None and now_s - running.started_s > running.section.limit_s:
            self._tell(running)
        elif running.told_s is not None and now_s - running.told_s > running.section.grace_s:
            _signal_group(running.process, signal.SIGKILL)

    def _tell(self, running: Running) -> None:
        running.told_s = time.monotonic()
        _signal_group(running.process, signal.SIGTERM)

    def _print(self) -> None:
        """Print what has ended, unless another is being printed; else go on with the eldest."""
        shown = next((running for running in self._all() if running.is_announced), None)
        while shown is not None or self._ended:
            shown = shown or self._ended[0]
            self._copy(shown)
            if shown not in self._ended:
                return
            self._close(shown)
            shown = None
        if self._under_way:
            self._copy(self._under_way[0])

    def _all(self) -> list[Running]:
        return [*self._ended, *self._under_way]

    def _copy(self, running: Running) -> None:
        if not running.is_announced:
            running.is_announced = True
            print(f"\n########## {running.section.name}", flush=True)
        sys.stdout.buffer.write(running.output.read())
        sys.stdout.flush()

    def _close(self, running: Running) -> None:
        self._ended.remove(running)
        running.output.seek(0)
        lines = running.output.read().decode(errors="replace").splitlines()
        running.output.close()
        name, status = running.section.name, running.process.returncode
        seconds = running.ended_s - running.started_s
        result = _result(status, lines, timed_out=running.told_s is not None)
        if status:
            self.failed = True
            end = "\n".join(lines[-_LAST_LINES:])
            self._last_words.append(f"\n########## {name}, the end:\n{end}")
        self._rows.append(row(name, seconds, result))
        print(f"########## {name}: {result} after {seconds:.0f} s", flush=True)


def _result(status: int, lines: list[str], *, timed_out: bool) -> str:
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
    closing = next((found for line in reversed(plain) if (found := _CLOSING.match(line))), None)
    counts = f": {closing.group(1)}" if closing is not None else ""
    if status:
        return f"FAILED ({'ended at its limit' if timed_out else status}){counts}"
    if closing is not None and re.match(r"\d+ skipped", closing.group(1)):
        return "skipped: its tests say why"
    return f"passed{counts}"


def row(name: str, seconds: float, result: str) -> str:
    """One line of the table."""
    return f"{name:28} {seconds:5.0f} s   {result}"


def slowest(times: Path) -> str:
    """The tests that took longest, of all sections."""
    lines = [line.split("\t") for line in times.read_text().splitlines()]
    tests = sorted(((float(seconds), test) for seconds, test in lines), reverse=True)
    shown = [f"{seconds:8.1f} s   {test}" for seconds, test in tests[:NUM_SLOWEST]]
    return "\n".join([f"\n########## The slowest {len(shown)} of {len(tests)} tests", *shown])


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.killpg(process.pid, number)


class _Interrupted(BaseException):
    """SIGINT, SIGTERM or SIGHUP came."""


def _interrupt(number: int, frame: object) -> NoReturn:
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # once is enough: the end is not to be cut short
    raise _Interrupted


def main() -> int:
    """Run the sections that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every test at every world size")
    parser.add_argument("--torch", type=lambda names: names.split(","), metavar="VERSIONS")
    parser.add_argument("--set-up-s", type=float, default=0.0)
    parser.add_argument("parts", nargs="*", metavar="SECTION", help=", ".join(PARTS + BY_NAME))
    options = parser.parse_args()
    started_s = time.monotonic() - options.set_up_s
    wanted = options.parts or PARTS
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    with tempfile.TemporaryDirectory(prefix="dear-sections-") as name:
        times = Path(name) / "times"
        times.touch()
        listed = list_sections(everything=options.all)
        sections = [each for each in listed if each.part in wanted]
        if options.torch:
            sections = list_torch_sections(options.torch)
        os.environ[TIMES_VARIABLE] = str(times)
        os.environ.pop(
            "PYTHONDONTWRITEBYTECODE", None
        )  # each of hundreds of processes compiles else
        for environment, parts in _FORKING.items():
            if parts & {section.part for section in sections}:
                share_server(ROOT / environment / "bin" / "python")
        runner = Runner(sections, Path(name))
        try:
            runner.run()
        except _Interrupted:
            runner.stop()
            print("bin/test: interrupted", file=sys.stderr)
            return 130
        print(slowest(times))
    print(runner.summary())
    result = "FAILED" if runner.failed else "passed"
    print(row("set-up", options.set_up_s, "passed"))
    print(row("total", time.monotonic() - started_s, result), flush=True)
    return int(runner.failed)


if __name__ == "__main__":
    sys.exit(main())
