"""However a process ends, the whole job does, and it is said why."""

from __future__ import annotations

import errno
import io
import re
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

import pytest
import torch.distributed as dist

from dearmpi.comm import lifecycle
from dearmpi.comm import world as world_module
from dearmpi.comm.backends.alone import AloneCollectives
from dearmpi.comm.lifecycle import abort_on_exception
from dearmpi.comm.world import World
from dearmpi.errors import CommError, ConfigError
from tests.fakes.ranks import run_ranks


@pytest.fixture(autouse=True)
def keep_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """These processes go on after the end of a job."""
    monkeypatch.setattr(lifecycle, "ignore_signals", lambda: None)


def test_an_abort_ends_with_its_code() -> None:
    with pytest.raises(SystemExit) as ended:
        run_ranks(2, lambda world: world.abort(6) if world.rank else world.barrier())
    assert ended.value.code == 6


def test_an_abort_stops_the_progress_thread_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI's exit takes down libraries in which it might be at work."""
    alive: list[bool] = []

    class Collectives(AloneCollectives):
        def abort(self, code: int) -> None:
            alive.extend(thread.is_alive() for thread in drivers)
            raise SystemExit(code)

    monkeypatch.setattr(world_module, "_ABORT_PATIENCE_S", 30.0)
    before = set(threading.enumerate())
    world = World(Collectives(), progress="thread")
    drivers = set(threading.enumerate()) - before
    with pytest.raises(SystemExit):
        world.abort(6)
    assert alive == [False]


class Full(io.StringIO):
    """A stream on a disk without room."""

    def write(self, text: str) -> int:
        """Fails."""
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None:
        """Fails."""
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("state", ["closed", "full", "none"])
@pytest.mark.parametrize("way", ["abort", "exception"])
def test_an_abort_happens_whatever_became_of_the_streams(
    way: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams: dict[str, TextIO | None] = {"closed": io.StringIO(), "full": Full(), "none": None}
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def end(world: World) -> None:
        if not world.is_root:
            return world.barrier()
        if way == "abort":
            world.abort(1)
        abort_on_exception(world)
        sys.excepthook(ValueError, ValueError("a wrong turn"), None)

    streams["closed"].close()  # type: ignore[union-attr]
    with monkeypatch.context() as patch:
        for name in ("stdout", "stderr", "__stderr__"):
            patch.setattr(sys, name, streams[state])
        with pytest.raises(SystemExit) as ended:
            run_ranks(2, end)
    assert ended.value.code == 1


def test_each_line_of_what_nobody_catches_has_its_rank(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Those of several ranks come mixed."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def fail(world: World) -> None:
        if not world.is_root:
            return world.barrier()
        abort_on_exception(world)
        try:
            raise ValueError("a wrong turn\nand another")
        except ValueError as error:
            sys.excepthook(ValueError, error, None)

    with pytest.raises(SystemExit):
        run_ranks(2, fail)
    told = [line for line in capfd.readouterr().err.splitlines() if line]
    assert len(told) > 3 and all(line.startswith("[rank 0 on fakehost] ") for line in told)


def test_what_nobody_catches_is_told_even_if_torch_holds_standard_error_back(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """torch.distributed has a hook of its own, which would tell once this one has returned."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def fail(world: World) -> None:
        if not world.is_root:
            return world.barrier()
        abort_on_exception(world)
        dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
        try:
            sys.excepthook(ValueError, ValueError("a wrong turn"), None)
        finally:
            dist.destroy_process_group()

    with pytest.raises(SystemExit) as ended:
        run_ranks(2, fail)
    assert ended.value.code == 1
    assert "[rank 0 on fakehost] ValueError: a wrong turn" in capfd.readouterr().err


def test_an_error_of_ours_begins_with_the_place_in_the_users_code(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """And not with pages of this package's and of torch's."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def fail(world: World) -> None:
        if not world.is_root:
            return world.barrier()
        abort_on_exception(world)
        try:
            world.all_reduce([1.0], "mistaken")  # type: ignore[arg-type]
        except ConfigError as error:
            sys.excepthook(ConfigError, error, None)

    with pytest.raises(SystemExit) as ended:
        run_ranks(2, fail)
    assert ended.value.code == 2
    first, second = capfd.readouterr().err.splitlines()[:2]
    kind = r"\[rank 0 on fakehost\] ConfigError \[unknown-choice\] at "
    assert re.match(rf"{kind}{re.escape(__file__)}:\d+, in fail: op is 'mistaken'", first)
    assert second == "[rank 0 on fakehost] Traceback (most recent call last):"


@pytest.mark.parametrize(
    ("kind", "waits"), [("ERR_OTHER", True), ("ERR_TYPE", False), ("ours", False)]
)
def test_a_rank_under_which_mpi_has_failed_lets_the_one_that_knows_why_end_the_job(
    kind: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mpi = pytest.importorskip("dearmpi.comm.backends.mpi")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    slept: list[float] = []

    def fail(world: World) -> None:
        if not world.is_root:
            return world.barrier()
        abort_on_exception(world)
        monkeypatch.setattr(time, "sleep", slept.append)
        error = CommError("all-reduce failed")
        error.__cause__ = (
            ValueError("a wrong turn")
            if kind == "ours"
            else mpi.MPI.Exception(getattr(mpi.MPI, kind))
        )
        sys.excepthook(CommError, error, None)

    with pytest.raises(SystemExit):
        run_ranks(2, fail)
    assert (3.0 in slept) == waits


def test_a_framework_that_finds_no_rendezvous_is_told_what_to_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As accelerate with ``cpu=True`` does under mpirun."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ValueError, match="MASTER_ADDR") as raised:
        dist.init_process_group("gloo", rank=0, world_size=2)
    told = lifecycle._describe(raised.value)
    assert told.endswith(lifecycle._RENDEZVOUS_CURE)
    assert "python -m dearmpi" in told
    assert not lifecycle._describe(ValueError("another")).endswith(lifecycle._RENDEZVOUS_CURE)
