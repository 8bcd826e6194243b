"""Job: a command on several ranks, with a time limit, that leaves no process and no file behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tests.forks.start import MARK_LENGTH, MARK_VARIABLE
from tests.roster import FOLDER_VARIABLE, is_launched, launched_rank

TIMES_VARIABLE = "DEARMPI_TEST_TIMES"  # the file to which pytest adds how long each test took
_LAUNCHER_PREFIXES = (
    *("PMI_", "PMIX_", "OMPI_", "OPAL_", "PRTE_", "HYDI_", "MPI_LOCAL", "HYDRA_"),
    "MPI4PY_RC_INITIALIZE",  # set by a rank for what it starts
)
_UNBUFFERED = "PYTHONUNBUFFERED"  # tears lines into pieces, between which other ranks write
_SEGMENTS = ("mpich_shm_*", "sm_segment.*", "vader_segment.*")
_POLL_S = 0.05
_STRAGGLERS_S = 10.0  # how long what a launcher ends may take to be gone
_SEGMENTS_S = 20.0  # between looks for shared memory that no process uses


def clean_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """``environment`` without what an MPI launcher or an outer test run put there."""
    launched = is_launched(environment)
    return {
        name: value
        for name, value in environment.items()
        if not (launched and name.startswith(_LAUNCHER_PREFIXES))
        and name not in (FOLDER_VARIABLE, TIMES_VARIABLE, _UNBUFFERED)
    }


def find_mpiexec(python: Path) -> Path:
    """The mpiexec of ``python``'s environment, else that of the PATH."""
    own = python.parent / "mpiexec"
    found = own if own.exists() else shutil.which("mpiexec")
    if found is None:
        raise FileNotFoundError(f"no mpiexec beside {python} or on the PATH; run bin/setup test")
    return Path(found)


def launch_command(mpiexec: Path, ranks: int, command: Sequence[str]) -> list[str]:
    """``command`` on ``ranks`` ranks of this machine, be they more than its cores."""
    version = subprocess.run(
        [mpiexec, "--version"], capture_output=True, text=True, check=False, timeout=60
    ).stdout
    crowded = ["--oversubscribe", "--bind-to", "none"] if "Open MPI" in version else []
    return [str(mpiexec), *crowded, "-n", str(ranks), *command]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended.

    returncode: the launcher's; 124 if the limit ended the job.
    output: standard output and error of all ranks, in the order of arrival; empty if it was shown.
    left_over: processes that did not end when the launcher had gone, and were killed.
    """

    returncode: int
    output: str
    duration_s: float
    timed_out: bool
    left_over: int


class Job:
    """``command`` under mpiexec; a context manager, at whose end nothing of it is left.

    command: without mpiexec; ``[sys.executable, "script.py"]``, or a console script's path.
    limit_s: counted from the start; then the job is killed.
    python: the environment whose mpiexec starts it: ``.venv-openmpi/bin/python`` for Open MPI.
    shown: whether output goes to this process's, rather than into ``output``.
    """

    _segments_s = 0.0  # when the next look for unused shared memory is due (monotonic clock)

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        ranks: int,
        limit_s: float,
        python: Path = Path(sys.executable),
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        shown: bool = False,
    ) -> None:
        self._limit_s = limit_s
        self._is_clean = False
        self._scratch = Path(tempfile.mkdtemp(prefix="dear-"))
        self._mark = uuid.uuid4().hex
        self._started_s = time.monotonic()
        self._output = self._scratch / "output"
        mpiexec = find_mpiexec(python)
        with self._output.open("wb") as output:
            stream = None if shown else output
            self._process = subprocess.Popen(
                launch_command(mpiexec, ranks, [str(part) for part in command]),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                cwd=folder,
                env=self._environment(mpiexec, environment or {}),
                start_new_session=True,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._clean()

    @property
    def duration_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started_s

    def output(self) -> str:
        """What the ranks have printed so far."""
        return self._output.read_text(errors="replace")

    def is_running(self) -> bool:
        """Whether the launcher is."""
        return self._process.poll() is None

    def rank_pids(self) -> dict[int, int]:
        """Process numbers of the ranks that have started, by rank (Linux)."""
        ranks: dict[int, int] = {}
        # A fork before the client that stands for it, and a rank before the children that inherit
        # its name or variables: it came first.
        for process in sorted(
            _processes_of(self._mark), key=lambda each: (not each.is_fork, each.pid)
        ):
            if process.rank is not None:
                ranks.setdefault(process.rank, process.pid)
        return ranks

    def wait_for(self, text: str, *, timeout_s: float) -> bool:
        """Whether ``text`` was printed within ``timeout_s`` and before the job ended."""
        deadline = time.monotonic() + timeout_s
        while text not in self.output():
            if time.monotonic() > deadline or not self.is_running():
                return text in self.output()
            time.sleep(_POLL_S)
        return True

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to one rank."""
        os.kill(self.rank_pids()[rank], number)

    def signal_launcher(self, number: signal.Signals) -> None:
        """Send a signal to mpiexec."""
        self._process.send_signal(number)

    def wait(self) -> Ended:
        """Wait for the end, or bring it about at the limit."""
        timed_out = False
        while self.is_running():
            if self.duration_s > self._limit_s:
                timed_out = True
                break
            time.sleep(_POLL_S)
        return self.end(timed_out=timed_out)

    def end(self, *, timed_out: bool = False) -> Ended:
        """Kill what still runs, and say how it ended."""
        duration_s = self.duration_s
        was_running = self.is_running()
        left_over = self._kill() if was_running or self._has_stragglers() else 0
        output = self.output()
        self._clean(is_killed=True)
        return Ended(
            returncode=124 if timed_out else self._process.wait(),
            output=output,
            duration_s=duration_s,
            timed_out=timed_out,
            left_over=0 if was_running else left_over,
        )

    def _environment(self, mpiexec: Path, extra: Mapping[str, str]) -> dict[str, str]:
        variables = clean_environment()
        outer = variables.get(MARK_VARIABLE)
        return variables | {
            "PATH": f"{mpiexec.parent}{os.pathsep}{variables.get('PATH', os.defpath)}",
            # Session folders, and whatever a killed rank leaves, go where they can be removed.
            "TMPDIR": str(self._scratch),
            MARK_VARIABLE: f"{outer},{self._mark}" if outer else self._mark,
            "OMP_NUM_THREADS": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_mpi_yield_when_idle": "1",
            **extra,
        }

    def _clean(self, *, is_killed: bool = False) -> None:
        if self._is_clean:
            return
        if not is_killed:
            self._kill()
        if time.monotonic() > Job._segments_s:  # a look takes longer than many a job
            remove_segments()
            Job._segments_s = time.monotonic() + _SEGMENTS_S
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._is_clean = True

    def _has_stragglers(self) -> bool:
        """A launcher may end first and have its proxies kill the ranks: whether some stay."""
        deadline = time.monotonic() + _STRAGGLERS_S
        while any(_processes_of(self._mark)):
            if time.monotonic() > deadline:
                return True
            time.sleep(_POLL_S)
        return False

    def _kill(self) -> int:
        """Kill all that is left of the job; the number of processes that were."""
        killed: set[int] = set()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            left = [process.pid for process in _processes_of(self._mark)]
            if self._process.poll() is None and self._process.pid not in left:
                left.append(self._process.pid)
            if not left:
                break
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed.update(left)
            time.sleep(_POLL_S)
        return len(killed)


def run_job(
    command: Sequence[str | Path],
    *,
    ranks: int,
    limit_s: float,
    python: Path = Path(sys.executable),
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Run ``command`` on ``ranks`` ranks to its end; the arguments are those of ``Job``."""
    with Job(
        command,
        ranks=ranks,
        limit_s=limit_s,
        python=python,
        folder=folder,
        environment=environment,
    ) as job:
        return job.wait()


@dataclass(frozen=True, slots=True)
class _Process:
    """A living process of a job. rank: None for the launcher and its own processes."""

    pid: int
    rank: int | None
    is_fork: bool


def _processes_of(mark: str) -> Iterator[_Process]:
    """Living processes of the job with ``mark``; forks carry it in their name."""
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            mark_of_fork, _, rank = (
                _read(f"/proc/{name}/comm").decode(errors="replace").strip().partition(".")
            )
            if len(mark_of_fork) == MARK_LENGTH and mark.startswith(mark_of_fork):
                yield _Process(int(name), int(rank) if rank.isdecimal() else None, is_fork=True)
                continue
            data = _read(f"/proc/{name}/environ")
            if mark.encode() in data:
                pairs = (item.partition("=") for item in data.decode(errors="replace").split("\0"))
                variables = {key: value for key, _, value in pairs}
                launched = launched_rank(variables) if is_launched(variables) else None
                yield _Process(int(name), launched, is_fork=False)


def _read(path: str) -> bytes:
    """The file's bytes, by as few calls as it takes: hundreds are read for each job."""
    handle = os.open(path, os.O_RDONLY)
    try:
        parts = []
        while part := os.read(handle, 1 << 17):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(handle)


def remove_segments(*, least_age_s: float = 30.0) -> None:
    """Remove shared memory files of MPI that no process seen here has open or mapped any more.

    Not the newest: between ranks that start, perhaps of a job beside this one in a container that
    shares the memory but not the processes, MPICH's segment must not go, or they wait for ever.
    """
    shared, now = Path("/dev/shm"), time.time()
    for path in [path for pattern in _SEGMENTS for path in shared.glob(pattern)]:
        with contextlib.suppress(OSError):
            state = path.stat()
            is_old = now - max(state.st_mtime, state.st_ctime) >= least_age_s
            if state.st_uid == os.getuid() and is_old and not _is_used(path):
                path.unlink()


def _is_used(path: Path) -> bool:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(path) in (process / "maps").read_text():
                return True
            if any(os.readlink(handle) == str(path) for handle in (process / "fd").iterdir()):
                return True
    return False
