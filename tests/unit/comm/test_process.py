"""Launch: what a launcher says of its ranks, and launches that cannot work."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from types import ModuleType

import pytest

from dearmpi.comm import process as workers
from dearmpi.comm.process import (
    announced_rank,
    announced_size,
    check_launch,
    failed_start,
    ignore_signals,
    refuse_launcher,
    report_alone,
    tcp_defaults,
)
from dearmpi.errors import DearError, LaunchError
from tests.codes import raises


@pytest.mark.parametrize(
    ("environment", "size"),
    [
        ({}, 1),
        ({"PMI_SIZE": "4"}, 4),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, 3),
        ({"SLURM_STEP_NUM_TASKS": "2"}, 2),
        ({"SLURM_NTASKS": "8"}, 1),  # of the batch job; this process may be its only one
        ({"PMI_SIZE": "4", "SLURM_STEP_NUM_TASKS": "2"}, 4),  # under hydra SLURM counts nodes
        ({"OMPI_COMM_WORLD_SIZE": "6", "SLURM_STEP_NUM_TASKS": "2"}, 6),
        ({"WORLD_SIZE": "2"}, 1),  # of a script that was written for another launcher
        ({"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}, 2),
        ({"WORLD_SIZE": "2", "RANK": "1"}, 2),  # of what starts ranks as torchrun does
        ({"WORLD_SIZE": "2", "RANK": "1", "PMI_SIZE": "1"}, 1),  # mpirun counts its own
        ({"WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "7", "SLURM_STEP_NUM_TASKS": "1"}, 8),
        ({"PMI_SIZE": ""}, 1),
        ({"PMI_SIZE": "many"}, 1),
    ],
)
def test_what_the_launcher_announced(environment: dict[str, str], size: int) -> None:
    assert announced_size(environment) == size


def test_worlds_of_one_that_should_be_one_world_are_refused() -> None:
    with raises(LaunchError, "launcher-mismatch", 4, "--mpi=pmi2", "mpirun"):
        check_launch(1, {"SLURM_STEP_NUM_TASKS": "4"})


def test_who_comes_with_torchrun_is_told_what_takes_its_place() -> None:
    with raises(LaunchError, "launcher-mismatch", "torchrun", "mpirun -n 2 python"):
        check_launch(1, {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"})
    check_launch(1, {"WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"})
    with raises(LaunchError, "launcher-mismatch", "RANK=1", 2, "unset RANK and WORLD_SIZE"):
        check_launch(1, {"WORLD_SIZE": "2", "RANK": "1"})


def test_launches_that_fit_are_accepted() -> None:
    check_launch(1, {})
    check_launch(1, {"PMI_SIZE": "1"})
    check_launch(4, {"PMI_SIZE": "4", "SLURM_STEP_NUM_TASKS": "2"})


PIP_MPICH = "MPICH Version: 5.0.2\nMPICH configure: --with-device=ch4:ucx,ofi --with-pm=hydra\n"


def test_mpich_that_cannot_start_under_its_launcher_is_refused_before_it_tries() -> None:
    open_mpi = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "PMIX_NAMESPACE": "a"}
    with raises(LaunchError, "launcher-mismatch", 2, "mpirun that belongs", "beside python"):
        refuse_launcher(PIP_MPICH, open_mpi)
    slurm = {"PMIX_NAMESPACE": "slurm.pmix.7.0", "PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "4"}
    with raises(LaunchError, "launcher-mismatch", 4, "srun --mpi=pmi2"):
        refuse_launcher(PIP_MPICH, slurm)


def test_mpich_that_may_start_is_let_through() -> None:
    open_mpi = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "PMIX_NAMESPACE": "a"}
    for library in ("Open MPI v5.0.8", "CRAY MPICH version 8.1", f"{PIP_MPICH[:-1]} --with-pmix\n"):
        refuse_launcher(library, open_mpi)
    for environment in (
        {},
        {"PMI_SIZE": "2", "PMI_RANK": "0"},
        {**open_mpi, "OMPI_COMM_WORLD_SIZE": "1"},
        {**open_mpi, "MPIR_CVAR_PMI_VERSION": "1"},
        {**open_mpi, "PMI_SIZE": "2", "PMI_RANK": "0"},
    ):
        refuse_launcher(PIP_MPICH, environment)


@pytest.mark.parametrize(
    ("error", "rank", "local", "said"),
    [
        (LaunchError("a\nb", code="launcher-mismatch"), 0, 0, "p: error: a\np: b [launcher-m"),
        (LaunchError("a", code="launcher-mismatch"), 2, 0, ""),
        (LaunchError("a", code="mpi-not-loaded"), 2, 0, f"[rank 2 on {os.uname().nodename}] error"),
        (LaunchError("a", code="mpi-not-loaded"), 3, 1, ""),
        (LaunchError("a", code="mpi-not-started"), 3, 1, f"[rank 3 on {os.uname().nodename}] err"),
        (DearError("a"), 3, 1, f"[rank 3 on {os.uname().nodename}] error: a\n"),
    ],
)
def test_an_error_without_a_world_is_reported_by_those_that_alone_may_meet_it(
    error: DearError,
    rank: int,
    local: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    for name, value in (("PMI_SIZE", 4), ("PMI_RANK", rank), ("MPI_LOCALRANKID", local)):
        monkeypatch.setenv(name, str(value))
    report_alone(error, prefix="p: ")
    found = capfd.readouterr().err
    assert found.startswith(said) and bool(found) == bool(said)


@pytest.mark.parametrize(
    ("library", "environment", "cure"),
    [
        ("MPICH Version: 4.3.2", {"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun that belongs to the lib"),
        ("MPICH Version: 4.3.2", {"PMIX_NAMESPACE": "slurm.pmix.7.0"}, "srun --mpi=pmi2"),
        (
            "MPICH Version: 5.0.2",
            {"PMIX_NAMESPACE": "slurm.pmix.7.0", "PMI_SIZE": "2", "PMI_RANK": "0"},
            "export MPIR_CVAR_PMI_VERSION=1",
        ),
        ("MPICH Version: 4.3.2 --with-pmix", {"PMIX_NAMESPACE": "a"}, "(PMIX_NAMESPACE)"),
        ("MPICH Version: 4.3.2", {"PMI_FD": "7", "PMI_RANK": "0"}, "(PMI_FD, PMI_RANK)"),
        ("Open MPI v5.0.8", {}, "UCX and libfabric"),
    ],
)
def test_a_start_that_mpi_has_ended_is_explained_by_its_launcher(
    library: str, environment: dict[str, str], cure: str
) -> None:
    error = failed_start(library, environment)
    assert error.code == "mpi-not-started" and cure in str(error)


EXITS = """
import ctypes, os, sys
from dearmpi.comm.process import reported_exit

with reported_exit(lambda: os._exit(3)):
    if sys.argv[1] == "inside":
        ctypes.CDLL(None).exit(16)
if sys.argv[1] == "after":
    ctypes.CDLL(None).exit(17)
sys.exit(18)  # no handler is left that would run Python then
"""


@pytest.mark.parametrize(("where", "status"), [("inside", 3), ("after", 17), ("never", 18)])
def test_an_exit_of_a_library_is_reported_in_the_block_alone(where: str, status: int) -> None:
    assert subprocess.run([sys.executable, "-c", EXITS, where], timeout=180).returncode == status


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, "0"),
        ({"PMI_RANK": "3"}, "3"),
        ({"PMI_RANK": "3", "SLURM_PROCID": "1"}, "3"),  # under hydra SLURM counts nodes
        ({"PMIX_RANK": "3"}, "3"),
        ({"SLURM_PROCID": "1"}, "1"),
        ({"RANK": "1"}, "0"),
        ({"RANK": "1", "TORCHELASTIC_RUN_ID": "none", "SLURM_PROCID": "0"}, "1"),
    ],
)
def test_which_rank_a_process_is(environment: dict[str, str], rank: str) -> None:
    assert announced_rank(environment) == rank


ENDED = (
    RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly"),
    BrokenProcessPool("A process in the process pool was terminated abruptly while ..."),
    RuntimeError("process 0 terminated with exit code 1"),
)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, None),
        ({"PMI_RANK": "1"}, "0"),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, "0"),
        ({"PMI_SIZE": "2", "MPI4PY_RC_INITIALIZE": "1"}, "1"),
    ],
)
def test_what_ranks_of_a_launcher_start_initialises_no_mpi(
    environment: dict[str, str], said: str | None
) -> None:
    workers.keep_from_mpi(environment)
    assert environment.get("MPI4PY_RC_INITIALIZE") == said


def test_a_worker_of_a_rank_is_refused_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    workers.refuse_workers({"PMI_RANK": "1"})
    monkeypatch.setattr(workers, "parent_process", object)
    workers.refuse_workers({})
    with raises(LaunchError, "connect-in-worker", "rank 1"):
        workers.refuse_workers({"PMI_RANK": "1"})


def test_advice_is_given_where_workers_may_have_called_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    main, mpi = ModuleType("__main__"), ModuleType("mpi4py.MPI")
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert not any(workers.advise_on_workers(error) for error in ENDED)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    vars(main)["MPI"] = mpi
    for error in ENDED:
        assert "Move such calls under if __name__" in workers.advise_on_workers(error)
    assert not workers.advise_on_workers(ValueError("another"))
    del vars(main)["MPI"]
    vars(main)["comm"] = type("Intracomm", (), {"__module__": "mpi4py.MPI"})()
    assert workers.advise_on_workers(ENDED[0])


SCRIPT = """
import sys, threading
import dearmpi.comm.process
from dearmpi.comm.process import Deadline
from dearmpi.comm.watchdog.watchdog import StallLimits

limits = StallLimits({limits})
deadline = Deadline(limits, origin="rank 1", what=lambda: "Godot", advice="look for him")
print("unflushed", end="")
{body}
"""
WARNED = "[rank 1] has waited N s for Godot: look for him\n"
NOTED = """
told, write = threading.Event(), dearmpi.comm.process.safe_output.write
dearmpi.comm.process.safe_output.write = lambda text: (write(text), told.set())
"""
GAVE_UP = "[rank 1] gave up after waiting N s for Godot: look for him\n"


@pytest.mark.parametrize(
    ("limits", "body", "code", "told"),
    [
        ("0.1, 0.2", "with deadline: threading.Event().wait()", 8, WARNED + GAVE_UP),
        ("0.1, 60", f"{NOTED}with deadline: told.wait(60)\nsys.exit(3)", 3, WARNED),
        (
            "0.1, 0.2",
            "sys.stdout.close()\nwith deadline: threading.Event().wait()",
            8,
            WARNED + GAVE_UP,
        ),
        ("0.1, 0.2", "sys.stderr.close()\nwith deadline: threading.Event().wait()", 8, ""),
        # What comes before and after may take as long as it likes.
        ("2.0, 2.2", "with deadline: pass\nthreading.Event().wait(2.5)\nsys.exit(3)", 3, ""),
        ("2.0, 2.2", "threading.Event().wait(2.5)\nwith deadline: pass\nsys.exit(3)", 3, ""),
    ],
)
def test_it_warns_then_ends_the_process_unless_it_is_met(
    limits: str, body: str, code: int, told: str
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(limits=limits, body=body)],
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert (ended.returncode, ended.stdout) == (code, "unflushed")
    assert re.sub(r"\d+ s", "N s", ended.stderr) == told


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    """As where a scheduler suspends the job."""
    body = (
        "import os, signal\n"
        "dearmpi.comm.process._STEP_S = 0.1\n"
        "with deadline: os.kill(os.getpid(), signal.SIGSTOP)\nsys.exit(3)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(limits="2.0, 2.5", body=body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        time.sleep(3.0)  # longer than the limits, which may not count it
        process.send_signal(signal.SIGCONT)
        _, told = process.communicate(timeout=120)
    assert (process.returncode, told) == (3, "")


EXITING = """
import ctypes, sys, threading
from dearmpi.comm.process import skip_exit_handlers

libc = ctypes.CDLL(None)
libc.on_exit(libc.abort, None)  # as a library whose end is the process's
if "skip" in sys.argv:
    skip_exit_handlers()
if "thread" in sys.argv:
    thread = threading.Thread(target=libc.exit, args=(5,))
    thread.start()
    thread.join()
libc.exit(5)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other C libraries have no on_exit()")
@pytest.mark.parametrize(
    ("how", "code"),
    [([], -signal.SIGABRT), (["skip"], 5), (["skip", "thread"], 5)],
)
def test_handlers_that_would_end_the_process_by_a_signal_are_left_out(
    how: list[str], code: int
) -> None:
    ended = subprocess.run([sys.executable, "-c", EXITING, *how], check=False, timeout=180)
    assert ended.returncode == code


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("sys.exit(3)", 3),
        ("try:\n    sys.exit(3)\nfinally:\n    print('at last', file=sys.stderr)", 3),
        ("sys.exit('no data')", 1),
        ("exit(4)", 4),
        ("raise SystemExit(5)", 5),
        ("raise SystemExit", 0),
        ("class Stop(SystemExit): pass\nraise Stop(6)", 6),
        ("leave(7)", 7),
        ("try:\n    raise SystemExit(8)\nexcept SystemExit as e:\n    e.code += 1", 0),
        ("error = SystemExit(3)\nerror.code = 9\nraise error", 9),
        ("sys.exit()", 0),
        ("try:\n    sys.exit(3)\nexcept SystemExit:\n    pass", 0),
        ("try:\n    sys.exit(3)\nexcept SystemExit as error:\n    kept = error", 0),
        ("threading.Thread(target=sys.exit, args=(3,)).start()", 0),
        ("raise ValueError", 1),
        ("import signal\nsignal.raise_signal(signal.SIGINT)", 130),
    ],
)
def test_the_status_with_which_a_program_ends_is_known_at_its_end(body: str, status: int) -> None:
    script = f"""
import atexit, sys, threading
from sys import exit as leave
from dearmpi.comm.process import exit_status, note_exit_status

note_exit_status()
atexit.register(lambda: print(exit_status()))
{body}
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=180
    )
    assert ended.stdout == f"{status}\n", ended.stderr
    assert ended.returncode == (status if status != 130 else -signal.SIGINT)


def test_an_exit_is_shown_and_pickled_as_pythons_own() -> None:
    script = """
import pickle, sys, traceback
from dearmpi.comm.process import note_exit_status

note_exit_status()
try:
    sys.exit("diverged")
except SystemExit as error:
    print(*traceback.format_exception_only(error), end="")
    print(type(pickle.loads(pickle.dumps(error))) is SystemExit)
"""
    shown = subprocess.check_output([sys.executable, "-c", script], text=True, timeout=180)
    assert shown == "SystemExit: diverged\nTrue\n"


def test_signals_are_ignored_although_their_handlers_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    alarms: list[int] = []

    def interrupt(call: Callable[..., object]) -> Callable[..., object]:
        """``call``, in which alarms arrive."""

        def interrupted(*arguments: object) -> object:
            if len(alarms) < 20:
                signal.raise_signal(signal.SIGUSR2)
            return call(*arguments)

        return interrupted

    def alarm(number: int, frame: object) -> None:
        alarms.append(number)
        raise RuntimeError("an alarm")

    signal.signal(signal.SIGUSR2, alarm)
    try:
        with monkeypatch.context() as patch:
            for name in ("valid_signals", "getsignal", "signal"):
                patch.setattr(signal, name, interrupt(getattr(signal, name)))
            ignore_signals()
        assert len(alarms) == 20
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    finally:
        for number, handler in handlers.items():
            if handler is not None and number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, handler)


@pytest.mark.parametrize(
    ("library", "environment", "told"),
    [
        ("Open MPI v5.0.11, package", {}, {"OMPI_MCA_btl_tcp_flags": "send,inplace"}),
        ("Open MPI v5.0.11, package", {"OMPI_MCA_btl_tcp_flags": "send,put"}, {}),
        ("MPICH Version:\t5.0.2", {}, {"UCX_TCP_RX_SEG_SIZE": "1m"}),
        ("MPICH Version:\t5.0.2", {"UCX_TCP_RX_SEG_SIZE": "64k"}, {}),
        ("MPICH Version:\t5.0.2", {"UCX_TLS": "tcp,self"}, {"UCX_TCP_RX_SEG_SIZE": "1m"}),
        ("MPICH Version:\t5.0.2", {"UCX_NET_DEVICES": "eth0"}, {"UCX_TCP_RX_SEG_SIZE": "1m"}),
        ("MPICH Version:\t5.0.2", {"UCX_TLS": "posix,self"}, {}),
        ("MPICH Version:\t5.0.2", {"UCX_TLS": "^tcp"}, {}),
        ("MPICH Version:\t5.0.2", {"UCX_NET_DEVICES": "mlx5_0:1"}, {}),
    ],
)
def test_what_mpi_is_told_of_tcp_leaves_the_users_settings(
    library: str, environment: dict[str, str], told: dict[str, str]
) -> None:
    """UCX warns of a setting that it has no use for, on every rank."""
    assert tcp_defaults(library, environment) == told
