"""A contest treats all methods alike."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
from torch import Tensor, nn

from dearmpi.bench import comparison as contest
from dearmpi.bench.comparison import Length, compare_methods, least_warming
from dearmpi.bench.method import Entrant, Method, Setup
from dearmpi.bench.method_names import read_method
from dearmpi.bench.own_methods import alone as train_alone
from dearmpi.bench.result import Block, LinkTimes, MeasuredIteration, Result, Row
from dearmpi.bench.workload_model import ReplayedModel
from dearmpi.comm.world import World
from dearmpi.engine.setup.self_planning import LEAST_STEPS
from dearmpi.plan.data.workload import read_workload
from dearmpi.plan.model.profile import profile_workload
from tests.fakes import FakeHub
from tests.fakes.ranks import run_ranks

NUM_WARMUP, NUM_BATCHES = 1, 2
PROFILE = profile_workload(read_workload("equal:0.01:2"), feed_forward_s=1e-4, backprop_s=2e-4)


@pytest.mark.parametrize(
    ("num_tuning", "before"), [(0, (0, 0)), (2, (LEAST_STEPS, LEAST_STEPS)), (9, (LEAST_STEPS, 9))]
)
def test_every_method_is_as_warm_as_one_that_plans(
    alone: World, num_tuning: int, before: tuple[int, int]
) -> None:
    """The first iterations of a block take longer, whatever is done in them."""
    backprops: dict[str, int] = {}
    methods = [_counted("plain", backprops), _counted("other", backprops, num_tuning=num_tuning)]
    subject = ReplayedModel(
        PROFILE,
        batch_size=8,
        rank=0,
        world_size=1,
    )
    length = Length(num_warmup=NUM_WARMUP, num_batches=NUM_BATCHES, num_rounds=1)
    result = compare_methods(alone, subject, methods, length=length, tell=lambda line: None)
    assert [len(row.iterations()) for row in result.rows] == [NUM_BATCHES, NUM_BATCHES]
    others = NUM_WARMUP + NUM_BATCHES
    assert (backprops["plain"] - others, backprops["other"] - others) == before


@pytest.mark.parametrize(
    ("hosts", "iteration_s", "num_more"),
    [
        (2, 0.1, 37),  # 40 of them take four seconds, three of which are the warm-up
        (2, 1.0, 1),
        (2, 1.5, 0),
        (2, 1e-4, 997),  # more could not be judged in fp32
        (1, 0.1, 0),  # no network between them
    ],
)
@pytest.mark.parametrize("of", ["computation", "communication"])
def test_short_iterations_are_repeated_until_connections_are_warm(
    of: str, hosts: int, iteration_s: float, num_more: int
) -> None:
    less_s = min(0.01, iteration_s)
    compute_s, sent_s = (iteration_s, less_s) if of == "computation" else (less_s, iteration_s)
    result = Result(
        subject="equal",
        unit="img",
        batch_size=1,
        units_per_sample=1,
        world_size=4,
        hosts=hosts,
        alone=Row("alone", [Block((MeasuredIteration(0.0, compute_s, 0.0),), 0.0, None)]),
        rows=[],
        link=[LinkTimes(0.0, sent_s)],
        num_buckets=1,
        payload_bytes=8,
    )
    assert least_warming(result, Length(num_warmup=3)) == num_more
    result.link.clear()  # nothing is known
    assert least_warming(result, Length(num_warmup=3)) == 0


@pytest.mark.parametrize("hosts", [("a", "a"), ("a", "b")])
def test_every_method_between_hosts_is_as_warm_as_any_other(
    hosts: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the engine's own connections are as old as the job."""
    monkeypatch.setattr(contest, "_MOST_WARMING", 20)  # whatever an iteration takes here
    length = Length(num_warmup=NUM_WARMUP, num_batches=NUM_BATCHES, num_rounds=1, warm_up_s=1e6)

    def rank(world: World) -> tuple[int, int]:
        backprops: dict[str, int] = {}
        methods = [_counted(label, backprops) for label in ("plain", "other")]
        subject = ReplayedModel(PROFILE, batch_size=8, rank=world.rank, world_size=world.size)
        compare_methods(world, subject, methods, length=length, tell=lambda line: None)
        return backprops["plain"], backprops["other"]

    found = run_ranks(2, rank, hub=FakeHub(2, hosts=hosts))
    assert len({count for counts in found for count in counts}) == 1
    assert (found[0][0] > NUM_WARMUP + NUM_BATCHES) == (hosts == ("a", "b"))


def test_times_are_means_over_ranks_of_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 takes twice as long as rank 0, by a clock that nothing else moves."""
    clock = threading.local()

    def now() -> float:
        return getattr(clock, "now", 0.0)

    monkeypatch.setattr(contest, "time", SimpleNamespace(perf_counter=now, process_time=now))

    def rank(world: World) -> tuple[list[MeasuredIteration], float]:
        def spend(seconds: float) -> None:
            clock.now = now() + seconds * (1 + world.rank)

        class Slow(ReplayedModel):
            def build(self) -> nn.Module:
                model = ReplayedModel.build(self)
                model.register_forward_hook(lambda *_: spend(1.0))
                return model

        subject = Slow(PROFILE, batch_size=8, rank=world.rank, world_size=world.size)
        length = Length(num_warmup=NUM_WARMUP, num_batches=NUM_BATCHES, num_rounds=1)
        methods = [_spending(spend, backprop_s=2.0, step_s=3.0)]
        result = compare_methods(world, subject, methods, length=length, tell=lambda line: None)
        (row,) = result.rows
        assert not row.error
        return row.iterations(), row.cpu_s

    assert run_ranks(2, rank) == [([MeasuredIteration(1.5, 3.0, 4.5)] * NUM_BATCHES, 9.0)] * 2


@pytest.mark.parametrize(("seconds", "rounds"), [(1.0, 4), (8.0, 2), (40.0, 1)])
def test_a_slow_link_is_not_measured_in_every_round(
    alone: World, seconds: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contest, "measure_link", lambda *_, **__: [LinkTimes(seconds, seconds)])
    subject = ReplayedModel(PROFILE, batch_size=8, rank=0, world_size=1)
    length = Length(num_warmup=1, num_batches=1, num_rounds=4)
    methods = [read_method("serial")]
    result = compare_methods(alone, subject, methods, length=length, tell=lambda line: None)
    assert len(result.link) == rounds
    assert len(result.rows[0].blocks) == 4 and result.bounds is not None


def test_what_tunes_itself_is_known_before_it_enters() -> None:
    tuned = [name for name in ("dear", "planned", "bayes", "ddp") if read_method(name).tunes_itself]
    assert tuned == ["planned", "bayes"]


def _counted(label: str, backprops: dict[str, int], *, num_tuning: int = 0) -> Method:
    """Plain torch, which counts its backprops and has the first ``num_tuning`` for itself."""
    backprops[label] = 0

    def enter(setup: Setup) -> Entrant:
        def backward(loss: Tensor) -> None:
            backprops[label] += 1
            loss.backward()

        return replace(
            train_alone(setup), backward=backward, is_tuning=lambda: backprops[label] < num_tuning
        )

    return Method(label, enter, uses_group=False, tunes_itself=num_tuning > 0)


def _spending(spend: Callable[[float], None], *, backprop_s: float, step_s: float) -> Method:
    """One of the engine's own, which spends time on both."""

    def enter(setup: Setup) -> Entrant:
        plain = read_method("serial").enter(setup)

        def backward(loss: Tensor) -> None:
            loss.backward()
            spend(backprop_s)

        def step() -> None:
            plain.optimizer.step()
            spend(step_s)

        steps = SimpleNamespace(zero_grad=plain.optimizer.zero_grad, step=step)
        return replace(plain, optimizer=steps, backward=backward)

    return Method("spending", enter, uses_group=False)
