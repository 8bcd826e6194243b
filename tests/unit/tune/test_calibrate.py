from __future__ import annotations

import pytest

from dearmpi.comm.algorithms.registry import CollectiveAlgorithms
from dearmpi.comm.backends.alone import AloneCollectives
from dearmpi.comm.world import World
from dearmpi.errors import ConfigError
from dearmpi.tune.calibrate import LADDER, Run, Rung, calibrate, climb
from dearmpi.tune.calibration import Calibration
from tests.fakes import FakeHub
from tests.fakes.ranks import run_ranks

ALPHA_S, BETA = 2e-3, 1e-8
RING = CollectiveAlgorithms("ring")


def seconds(label: str, nbytes: int) -> float:
    """Reduce-scatters take three times as long as all-gathers."""
    return (3 if label == "RS" else 1) * (ALPHA_S + BETA * nbytes)


def measure(world: World, budget_s: float = 0.5) -> Calibration:
    return calibrate(
        world, CollectiveAlgorithms("exchange"), library="none at all", budget_s=budget_s
    )


def test_all_ranks_agree_on_what_the_wire_needs_at_least() -> None:
    hub = FakeHub(3, seconds=seconds, hosts=["a", "b", "b"])
    one, *others = run_ranks(3, measure, hub=hub)
    assert all(other == one for other in others)
    assert one.hosts == ("a", "b", "b")
    assert (one.library, one.algorithm) == ("none at all", "exchange")
    for label, samples in (("RS", one.reduce_scatter), ("AG", one.all_gather)):
        for times in samples:
            wire_s = seconds(label, times.nbytes)
            assert times.alone_s >= wire_s
            assert times.pair_s >= 2 * wire_s  # this wire carries one at a time


@pytest.mark.parametrize(("budget_s", "num_sizes"), [(0.0, 2), (60.0, 4)])
def test_sizes_go_as_far_as_the_time_allows(
    monkeypatch: pytest.MonkeyPatch, budget_s: float, num_sizes: int
) -> None:
    ladder = tuple(Rung(2**8 * 4**number, length=2) for number in range(4))
    monkeypatch.setattr("dearmpi.tune.calibrate.LADDER", ladder)
    for result in run_ranks(2, lambda world: measure(world, budget_s)):
        sizes = [times.nbytes for times in result.all_gather]
        assert sizes == [2**8 * 4**n for n in range(num_sizes)]
        assert sizes == [times.nbytes for times in result.reduce_scatter]


def test_buffers_are_no_larger_than_what_is_ever_sent() -> None:
    """A small model's job would otherwise have its peak of memory before the first step."""
    most_bytes = 3 << 20

    def rank(world: World) -> Calibration:
        return calibrate(world, RING, budget_s=60.0, most_bytes=most_bytes)

    for result in run_ranks(2, rank):
        sizes = [times.nbytes for times in (*result.all_gather, *result.reduce_scatter)]
        assert max(sizes) == most_bytes


def test_what_new_connections_lose_is_over_after_the_warm_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Few operations and short ones: this wire takes the time that it says.
    ladder = (Rung(2**8, length=1), Rung(2**10, length=1))
    monkeypatch.setattr("dearmpi.tune.calibrate.LADDER", ladder)
    calls: list[str] = []

    def on_a_new_connection(label: str, nbytes: int) -> float:
        calls.append(label)
        return (50 if len(calls) <= num_slow else 1) * seconds(label, nbytes)

    def smallest_s(warm_up_s: float) -> float:
        calls.clear()
        hub = FakeHub(2, seconds=on_a_new_connection)
        results = run_ranks(
            2, lambda world: calibrate(world, RING, budget_s=0.0, warm_up_s=warm_up_s), hub=hub
        )
        return results[0].all_gather[0].alone_s

    num_slow = 0
    # The best of a few where a busy machine would add to a time that may not be long.
    usual_s = min(smallest_s(0.0) for _ in range(2))
    num_slow = len(calls)
    assert smallest_s(0.0) > 10 * usual_s
    assert any(smallest_s(1e-6) < 5 * usual_s for _ in range(3))


def test_sizes_are_whole_shards() -> None:
    for result in run_ranks(3, lambda world: measure(world, 0.0)):
        assert all(times.nbytes % (4 * 3) == 0 for times in result.all_gather)


def test_a_world_of_one_is_refused() -> None:
    world = World(AloneCollectives(), progress="poll")
    with pytest.raises(ConfigError, match="start several with mpirun"):
        calibrate(world, RING)
    world.close()


def prepare(numel: int, count: int) -> Run:
    """Operations that take a second per MiB and a millisecond more, without taking it."""
    return lambda num, window: num * (1e-3 + 4 * numel / 2**20) / window


@pytest.mark.parametrize(
    ("budget_s", "least_mb", "most_mb"),
    [
        (1.0, 0.5, 0.5),  # twice the second rung would take 9 s
        (27.0, 2.9, 3.0),  # 9 operations of 2.999 s
        (63.0, 4.0, 4.0),  # twice that would take 72 s
        (1000.0, 32.0, 32.0),
    ],
)
def test_the_last_size_is_as_large_as_the_time_allows(
    budget_s: float, least_mb: float, most_mb: float
) -> None:
    world = World(AloneCollectives(), progress="poll")
    (times,) = climb(world, [prepare], budget_s=budget_s)
    assert least_mb <= times[-1].nbytes / 2**20 <= most_mb
    assert [one.nbytes for one in times[:2]] == [rung.nbytes for rung in LADDER[:2]]
    for one in times:
        assert one.alone_s == pytest.approx(1e-3 + one.nbytes / 2**20)
        assert one.pair_s == pytest.approx(one.alone_s)
    world.close()


def test_the_slowest_rank_counts() -> None:
    """All ranks plan for its link, whichever of them it is."""

    def rank(world: World) -> list[float]:
        def prepare_here(numel: int, count: int) -> Run:
            run = prepare(numel, count)
            return lambda num, window: run(num, window) * (1 + world.rank)

        (times,) = climb(world, [prepare_here], budget_s=27.0)
        return [one.alone_s / (1e-3 + one.nbytes / 2**20) for one in times]

    for factors in run_ranks(2, rank):
        assert factors == pytest.approx([2.0] * len(factors)) and len(factors) >= 2
