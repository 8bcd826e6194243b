"""Calibration over MPI: what every rank holds is the same, and is what the wire did."""

from __future__ import annotations

from typing import get_args

import pytest

from dearmpi.comm.algorithms.registry import CollectiveAlgorithms
from dearmpi.comm.world import World
from dearmpi.config import EngineConfig, ReduceScatter
from dearmpi.engine.codec.timing import measure_codec
from dearmpi.tune.calibrate import calibrate

pytestmark = pytest.mark.ranks(2, 3)


@pytest.mark.parametrize("algorithm", get_args(ReduceScatter))
def test_all_ranks_hold_the_same_costs(world: World, algorithm: ReduceScatter) -> None:
    result = calibrate(world, CollectiveAlgorithms(algorithm), library="as told", budget_s=0.05)
    texts = world.all_gather_text(result.to_json())
    assert texts == [texts[0]] * world.size
    assert result.world_size == world.size
    assert (result.hosts, result.algorithm) == (world.hosts, algorithm)
    for samples in (result.reduce_scatter, result.all_gather):
        assert all(times.alone_s > 0 and times.pair_s > 0 for times in samples)
    costs = result.costs
    assert costs.reduce_scatter.alone_s(2**20) > 0 and costs.all_gather.alone_s(2**20) > 0


def test_all_ranks_hold_what_compression_costs(world: World) -> None:
    codec = measure_codec(world, EngineConfig(compress="int8"))
    result = calibrate(world, CollectiveAlgorithms("ring"), budget_s=0.05, codec=codec)
    texts = world.all_gather_text(result.to_json())
    assert texts == [texts[0]] * world.size
    assert result.codec == codec and 0.25 < codec.reduced < 0.26
