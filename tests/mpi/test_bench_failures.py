"""Methods that fail, on all ranks or on one: the row says so, and the rest goes on."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dearmpi.bench import torch_methods
from dearmpi.bench.method import Entrant, Method, Setup
from dearmpi.bench.method_names import plug_in, read_method
from dearmpi.bench.output import describe_result
from dearmpi.bench.result import Result
from dearmpi.comm.world import World
from tests.mpi.comparisons import contest
from tests.mpi.entrants import (
    fails_in_backprop,
    fails_to_close,
    fails_to_enter,
    forgets_others,
)

_SHORT_S = 6.0  # where nobody comes

pytestmark = pytest.mark.ranks(1, 2)


def check_only_one_failed(result: Result, label: str, *words: str) -> None:
    for row in result.rows:
        if row.label == label:
            assert not row.blocks and all(word in row.error for word in words), row.error
        else:
            assert not row.error and row.blocks
    table = "\n".join(describe_result(result))
    assert f"\n{label}: " in table and "failed" in table


@pytest.mark.slow  # the ranks that did not fail wait for gloo's time limit
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda last: fails_to_enter(last), ("OSError: no such accelerator",)),
        (lambda last: fails_in_backprop(last, at=1), ("FloatingPointError: broken in two",)),
        (lambda last: fails_in_backprop(last, at=3), ("FloatingPointError: broken in two",)),
    ],
    ids=["enter", "first backprop", "third backprop"],
)
def test_a_peer_that_fails_on_one_rank_is_out_and_the_rest_goes_on(
    world: World, make: Any, words: tuple[str, ...]
) -> None:
    bad = Method("bad", make(world.size - 1))
    methods = (read_method("ddp"), bad, read_method("dear"))
    result, _ = contest(world, *methods, num_rounds=2, patience_s=_SHORT_S)
    check_only_one_failed(result, "bad", *words)
    assert "details" not in next(row.error for row in result.rows if row.label == "bad")


@pytest.mark.ranks(2)
def test_a_method_of_this_package_that_breaks_ends_the_benchmark(world: World) -> None:
    """Not the row alone: of one that breaks on some ranks the others would wait in MPI."""

    def enter(setup: Setup) -> Entrant:
        raise FloatingPointError("broken in two")

    bad = Method("bad", enter, uses_group=False, waits_in_mpi=True)
    assert read_method("dear").waits_in_mpi and not read_method("ddp").waits_in_mpi
    with pytest.raises(FloatingPointError, match="broken in two"):
        contest(world, bad, read_method("dear"))


def test_a_group_that_rank_0_cannot_open_is_out_and_the_rest_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_methods, "root_address", lambda one_host: "192.0.2.1")  # nobody's
    result, _ = contest(world, read_method("ddp"), read_method("dear"), patience_s=_SHORT_S)
    check_only_one_failed(result, "ddp", "cannot be reached at 192.0.2.1", "set MASTER_ADDR")


@pytest.mark.ranks(2)
def test_a_peer_may_give_its_memory_back_in_between(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("give_back_large", "reuse_pages"):
        monkeypatch.setattr(torch_methods, name, partial(calls.append, name))
    result, _ = contest(world, read_method("fsdp2:reuse_pages=false"), read_method("fsdp2"))
    assert calls == ["give_back_large", "reuse_pages"]
    assert all(row.blocks for row in result.rows)


@pytest.mark.ranks(2)
def test_a_method_that_averages_nothing_is_found_out(world: World) -> None:
    for ours in (False, True):  # which ends nothing: no rank waits for another by then
        bad = Method("bad", forgets_others, waits_in_mpi=ours)
        result, _ = contest(world, bad, read_method("wfbp"))
        check_only_one_failed(result, "bad", "trained wrongly", "layer0.weight")


def test_a_peer_that_is_not_installed_is_out_and_the_rest_goes_on(world: World) -> None:
    result, _ = contest(world, plug_in("not_installed_anywhere:make"), read_method("dear"))
    told = f"neither installed nor in {Path.cwd()}; install it, or start in its folder"
    check_only_one_failed(result, "not_installed_anywhere:make", told)


@pytest.mark.ranks(2)
def test_the_rank_that_failed_first_is_named_and_not_one_that_lost_the_others(world: World) -> None:
    def enter(setup: Setup) -> Entrant:
        if setup.world.rank == 0:
            raise RuntimeError("Horovod has been shut down. This was caused by an exception")
        raise OSError("no such accelerator")

    result, _ = contest(world, Method("bad", enter, uses_group=False), read_method("dear"))
    check_only_one_failed(result, "bad", "rank 1: OSError: no such accelerator")


def test_a_peer_that_fails_to_close_has_been_measured_all_the_same(world: World) -> None:
    def close() -> None:
        raise RuntimeError("cannot close")

    result, _ = contest(world, Method("bad", fails_to_close(close)), read_method("ddp"))
    assert all(len(row.blocks) == 1 for row in result.rows)


@pytest.mark.ranks(1)
def test_a_rank_alone_has_no_cap_to_search_for(world: World) -> None:
    result, _ = contest(world, read_method("bayes"), read_method("dear"))
    check_only_one_failed(result, "bayes", "one rank sends nothing")
