"""Communication alone, of which both bounds are made: what it sends is what is asked for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dearmpi.bench.link import measure_link
from dearmpi.bench.result import LinkTimes
from dearmpi.comm.fake import FakeHub
from dearmpi.comm.ranks import run_ranks
from dearmpi.comm.world import World
from dearmpi.config import CommDtype, EngineConfig
from dearmpi.plan.layout import ParamSpec, build_layout

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


def test_connections_between_hosts_are_used_for_a_while_before_it_counts() -> None:
    usual = len(sent("fp32"))
    assert len(sent("fp32", hosts=("a", "b"))) == usual
    assert len(sent("fp32", hosts=("a", "b"), warm_up_s=0.2)) > 2 * usual
    assert len(sent("fp32", warm_up_s=0.2)) == usual
