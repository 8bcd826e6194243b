"""A process that is forked while operations are under way leaves them to its parent."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest

from dearmpi.comm.progress.lane import Work
from dearmpi.comm.progress.progress import Progress
from dearmpi.config import ProgressMode
from dearmpi.errors import CommError
from tests.unit.comm.progress.works import MODES, Gate, do_nothing


def in_a_fork(act: Callable[[], str]) -> str:
    """What ``act`` returns there."""
    there, back = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            os.write(back, act().encode())
        finally:
            os._exit(0)
    os.close(back)
    with os.fdopen(there) as said:
        text = said.read()
    os.waitpid(child, 0)
    return text


@pytest.mark.parametrize("mode", MODES)
def test_a_fork_does_not_wait_for_what_its_parent_drives(mode: ProgressMode) -> None:
    progress = Progress(mode, origin="rank 0 on here")

    def wait() -> str:
        try:
            progress.wait_until(threading.Event().is_set, what="RS0")
        except CommError as error:
            return str(error)
        return "waited"

    text = in_a_fork(wait)
    progress.close()
    assert "forked from rank 0 on here waits for RS0" in text and "synchronize()" in text


def test_a_fork_that_submits_is_refused() -> None:
    progress = Progress("poll", origin="rank 0 on here")
    lane = progress.open_lane("rs", window=1)

    def submit() -> str:
        try:
            progress.submit(lane, Work("RS0", Gate, do_nothing))
        except CommError as error:
            return str(error)
        return "submitted"

    text = in_a_fork(submit)
    assert "forked from rank 0 on here waits for RS0" in text
    progress.close()


def test_a_fork_that_polls_drives_nothing() -> None:
    """As one does that only evaluates a model: its hooks poll, over its parent's connections."""
    progress, started = Progress("poll", origin="rank 0 on here"), []

    def start() -> Gate:
        started.append("RS0")
        return Gate()

    def poll() -> str:
        progress.poll()
        return f"started {len(started)}"

    lane = progress.open_lane("reduce-scatter", 1)
    progress.submit(lane, Work("RS0", start, do_nothing))
    assert in_a_fork(poll) == "started 0"
    progress.poll()
    assert started == ["RS0"]
    progress.close()
