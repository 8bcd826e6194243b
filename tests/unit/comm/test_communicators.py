"""Communicators, of which MPI has a limited number."""

from __future__ import annotations

import pytest

from dearmpi.comm.api.collectives import Collectives, Request
from dearmpi.comm.world import World
from dearmpi.errors import CommError
from tests.codes import raises
from tests.fakes import FakeCollectives
from tests.fakes.ranks import run_ranks


def test_whoever_has_no_communicator_left_is_told_what_holds_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: FakeCollectives) -> tuple[Collectives, Request]:
        raise RuntimeError("Other MPI error")

    def rank(world: World) -> None:
        num_lanes = world.progress.num_lanes
        world.open_channel("first", window=1).close()  # which counts no longer
        world.open_channel("second", window=1)
        monkeypatch.setattr(FakeCollectives, "start_duplicate", refuse)
        told = ("third", "Other MPI error", f"{num_lanes + 1} lanes", "close()")
        with raises(CommError, "channel-not-opened", *told):
            world.open_channel("third", window=1)

    run_ranks(1, rank)


def test_whoever_makes_groups_without_end_is_told_that_they_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> Collectives:
        raise RuntimeError("Other MPI error")

    def rank(world: World) -> None:
        world.group([0])
        monkeypatch.setattr(FakeCollectives, "make_group", refuse)
        told = ("Other MPI error", "2 groups", "not in every step")
        with raises(CommError, "channel-not-opened", *told):
            world.group([0])

    run_ranks(1, rank)
