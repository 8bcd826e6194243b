"""The first thread that aborts ends the job, also where the program ends meanwhile."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

import pytest

from dearmpi.comm import ending, lifecycle
from dearmpi.comm.backends.alone import AloneCollectives
from dearmpi.comm.ending import Ending
from dearmpi.comm.world import World


@pytest.mark.parametrize(
    ("code", "status"), [(7, 7), (0, 1), (256, 1), (-1, 255), (263, 7), (None, 1), ("7", 1)]
)
def test_no_aborted_job_ends_as_a_success(code: object, status: int) -> None:
    assert Ending().begin(code) == status


@pytest.fixture
def ended_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a process as an exception, right where it would come."""

    def end(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(ending, "_PATIENCE_S", 0.0)


@pytest.mark.usefixtures("ended_with")
def test_an_abort_in_an_abort_of_the_same_thread_goes_on() -> None:
    one = Ending()
    assert one.begin(7) == 7
    assert one.begin(3) == 7, "as in a signal's handler"


@pytest.mark.usefixtures("ended_with")
@pytest.mark.parametrize("way", ["leave", "abort", "exception", "group"])
def test_another_thread_ends_with_the_status_of_the_first(
    way: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    class Collectives(AloneCollectives):
        def abort(self, code: int) -> None:
            """As a thread that is still at it."""
            raise SystemExit

    world = World(Collectives(), progress="poll")
    group = world.group([0])
    assert group is not None

    def abort() -> None:
        with suppress(SystemExit):
            world.abort(7)

    first = threading.Thread(target=abort)
    first.start()
    first.join()
    with pytest.raises(SystemExit) as ended:
        if way == "leave":
            lifecycle.leave(world, None)
        if way == "abort":
            world.abort(3)
        if way == "group":
            group.abort(3)
        lifecycle.abort_on_exception(world)
        sys.excepthook(ValueError, ValueError("world closed"), None)
    assert ended.value.code == 7
    assert capfd.readouterr().err == "", "what follows from the abort is not what went wrong"
