"""Processes that a rank starts leave MPI alone; tests/mpi/test_workers.py starts some."""

from __future__ import annotations

import sys
from concurrent.futures.process import BrokenProcessPool
from types import ModuleType

import pytest

from dearmpi.comm.process import workers
from dearmpi.errors import LaunchError
from tests.codes import raises

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
    vars(main)["MPI"] = mpi
    for error in ENDED:
        assert "Move such calls under if __name__" in workers.advise_on_workers(error)
    assert not workers.advise_on_workers(ValueError("another"))
    del vars(main)["MPI"]
    vars(main)["comm"] = type("Intracomm", (), {"__module__": "mpi4py.MPI"})()
    assert workers.advise_on_workers(ENDED[0])
