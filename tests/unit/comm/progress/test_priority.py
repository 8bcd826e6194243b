"""The progress thread gives way to computation, and nothing else of the process does."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from dearmpi.comm.api.collectives import Completed
from dearmpi.comm.progress.lane import Work
from dearmpi.comm.progress.progress import Progress
from dearmpi.comm.progress.sleeping import yield_to_computation
from tests.unit.comm.progress.works import holds, in_thread

pytestmark = pytest.mark.skipif(
    not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER,
    reason="needs Linux and a process of the usual scheduling policy",
)

Standing = tuple[int, int]  # scheduling policy, niceness


def standing() -> Standing:
    """Of the calling thread."""
    return os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)


def test_the_progress_thread_alone_gives_way(threaded: Progress) -> None:
    found: list[Standing] = []
    before = standing()
    threaded.submit(
        threaded.open_lane("lane", window=1),
        Work("look", Completed, lambda: found.append(standing())),
    )
    threaded.wait_until(holds(found, 1), what="a look")
    assert found == [(os.SCHED_BATCH, max(5, before[1]))]
    assert standing() == before
    look = "import os; print(os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0))"
    child = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert child.stdout.split() == [str(part) for part in before]


@pytest.mark.parametrize("niceness", [0, 10])
def test_a_process_that_is_nice_already_stays_so(niceness: int) -> None:
    found: list[Standing] = []

    def look() -> None:
        own = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), max(own, niceness))
        yield_to_computation()
        found.append(standing())

    least = max(5, niceness, standing()[1])
    thread, errors = in_thread(look)
    thread.join()
    assert not errors
    assert found == [(os.SCHED_BATCH, least)]


def test_a_policy_of_the_process_s_own_stays() -> None:
    found: list[Standing] = []

    def look() -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        yield_to_computation()
        found.append(standing())

    niceness = standing()[1]
    thread, errors = in_thread(look)
    thread.join()
    assert not errors
    assert found == [(os.SCHED_IDLE, niceness)]


def test_a_system_that_forbids_it_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    before = standing()
    yield_to_computation()
    assert standing() == before
