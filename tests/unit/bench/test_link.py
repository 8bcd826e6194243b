"""Communication alone, of which both bounds are made: what it sends is what is asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dearmpi import DistributedOptimizer
from dearmpi.bench import link
from dearmpi.bench.link import measure_link
from dearmpi.bench.result import LinkTimes
from dearmpi.comm.algorithms.registry import CollectiveAlgorithms
from dearmpi.comm.api.collectives import Request
from dearmpi.comm.world import World
from dearmpi.config import CommDtype, EngineConfig, ReduceScatter
from dearmpi.plan.data.layout import ParamSpec, build_layout
from dearmpi.tune.calibrate import calibrate
from tests.fakes import FakeCollectives, FakeHub
from tests.fakes.ranks import run_ranks

LAYOUT = build_layout([[ParamSpec("a", (800,))], [ParamSpec("b", (400,))]], 2)
REPEATS = 2


def sent(
    comm_dtype: CommDtype, *, hosts: Sequence[str] = ("a", "a"), warm_up_s: float = 0
) -> list[tuple[str, int]]:
    """Kind and bytes of all that two ranks send."""
    found = []

    def seconds(label: str, nbytes: int) -> float:
        found.append((label, nbytes))
        return 0.0

    def rank(world: World) -> list[LinkTimes]:
        config = EngineConfig(comm_dtype=comm_dtype, reduce_scatter="ring")
        return measure_link(world, list(LAYOUT), config, repeats=REPEATS, warm_up_s=warm_up_s)

    results = run_ranks(2, rank, hub=FakeHub(2, seconds=seconds, hosts=hosts))
    assert results[0] == results[1] and len(results[0]) == REPEATS
    return sorted(found)


def test_half_precision_halves_what_is_sent() -> None:
    whole, half = sent("fp32"), sent("bf16")
    assert [label for label, _ in whole] == [label for label, _ in half]
    large = [(a, b) for (_, a), (_, b) in zip(whole, half, strict=True) if a > 100]
    assert large and all(a == 2 * b for a, b in large)


@pytest.mark.parametrize("comm_dtype", ["fp32", "bf16"])
def test_every_bucket_goes_both_ways_each_time(comm_dtype: CommDtype) -> None:
    assert len([nbytes for _, nbytes in sent(comm_dtype) if nbytes > 100]) >= 2 * 2 * REPEATS


def test_connections_between_hosts_are_used_for_a_while_before_it_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = threading.local()

    def now() -> float:
        """A hundredth of a second later each time."""
        clock.now = getattr(clock, "now", 0.0) + 0.01
        return float(clock.now)

    monkeypatch.setattr(link, "time", SimpleNamespace(perf_counter=now))
    usual = len(sent("fp32"))
    assert len(sent("fp32", hosts=("a", "b"))) == usual
    assert len(sent("fp32", hosts=("a", "b"), warm_up_s=1.0)) > 2 * usual
    assert len(sent("fp32", warm_up_s=1.0)) == usual


def test_the_slowest_rank_s_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "run_all", lambda world, *_: 1.0 + world.rank)

    def rank(world: World) -> list[LinkTimes]:
        return measure_link(world, list(LAYOUT), EngineConfig(), repeats=1)

    assert run_ranks(2, rank) == [[LinkTimes(2.0, 2.0)]] * 2


@pytest.mark.parametrize(("one_way_s", "expected"), [(0.5, 3), (2.4, 2), (2.6, 1), (30.0, 1)])
def test_over_a_slow_link_it_is_repeated_less_often(
    one_way_s: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the slowest rank's time, so that all ranks repeat alike."""
    monkeypatch.setattr(link, "run_all", lambda world, *_: one_way_s * (world.rank + 1) / 2)

    def rank(world: World) -> list[LinkTimes]:
        return measure_link(world, list(LAYOUT), EngineConfig(), repeats=3)

    assert run_ranks(2, rank) == [[LinkTimes(one_way_s, one_way_s)] * expected] * 2


def test_a_warm_up_ends_with_the_operation_in_which_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All operations once may take a minute over a slow link."""
    clock, sent = threading.local(), []

    def run_all(world: World, _: Any, starts: Sequence[Any]) -> float:
        clock.now = getattr(clock, "now", 0.0) + 1.5 * len(starts)
        if world.is_root:
            sent.append(len(starts))
        return 1.5 * len(starts)

    monkeypatch.setattr(link, "run_all", run_all)
    monkeypatch.setattr(
        link, "time", SimpleNamespace(perf_counter=lambda: getattr(clock, "now", 0.0))
    )

    def rank(world: World) -> list[LinkTimes]:
        return measure_link(world, list(LAYOUT), EngineConfig(), repeats=1, warm_up_s=2.0)

    run_ranks(2, rank, hub=FakeHub(2, hosts=("a", "b")))
    assert sent == [1, 1, 1, 1, 2, 2]  # once each, two in vain, then what counts


@pytest.mark.parametrize(
    ("algorithm", "comm_dtype"), [("native", "fp32"), ("ring", "bf16"), ("exchange", "fp16")]
)
def test_what_is_measured_is_what_training_sends(
    algorithm: ReduceScatter, comm_dtype: CommDtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both collectives by the same algorithm, in the same dtype."""
    posted: set[tuple[Any, ...]] = set()
    for name in ("start_reduce_scatter", "start_all_gather"):
        monkeypatch.setattr(FakeCollectives, name, _noting(name, posted))
    config = EngineConfig(reduce_scatter=algorithm, comm_dtype=comm_dtype)

    def train(world: World) -> None:
        model = nn.Linear(3, 2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model, world=world, config=config)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.close()

    def sent_by(rank: Callable[[World], Any]) -> set[tuple[Any, ...]]:
        posted.clear()
        run_ranks(2, rank)
        return set(posted)

    trained = sent_by(train)
    assert {name for name, *_ in trained} == {"start_reduce_scatter", "start_all_gather"}
    assert len(trained) == 2
    assert sent_by(lambda world: measure_link(world, list(LAYOUT), config, repeats=1)) == trained
    algorithms = CollectiveAlgorithms(algorithm, config.wire_dtype)
    assert sent_by(lambda world: calibrate(world, algorithms, budget_s=0.0)) == trained


def _noting(name: str, posted: set[tuple[Any, ...]]) -> Callable[..., Request]:
    """The collective ``name``, which notes how it sends a tensor, and not what the world tells."""
    start = getattr(FakeCollectives, name)

    def note(self: Any, buffer: Any, algorithm: str = "native", **options: Any) -> Request:
        if isinstance(buffer, torch.Tensor):
            posted.add((name, algorithm, options.get("wire_dtype")))
        request: Request = start(self, buffer, algorithm, **options)
        return request

    return note
