"""Training on a grid of ranks: what flat collectives train, and what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from dearmpi import DistributedOptimizer
from dearmpi.bench.collective_times import describe_collectives, measure_collectives
from dearmpi.comm.algorithms.registry import CollectiveAlgorithms, run_all
from dearmpi.comm.world import World
from dearmpi.config import EngineConfig
from dearmpi.errors import ConfigError
from dearmpi.tune.calibrate import calibrate
from dearmpi.tune.topology import measured_grid
from tests.codes import raises
from tests.mpi.oracle import copies, fingerprint
from tests.mpi.semantics import Side, adam, layers, train

pytestmark = pytest.mark.ranks(4)


def trained(world: World | None, **settings: Any) -> dict[str, torch.Tensor]:
    model, side = layers(), Side(world, **settings)
    optimizer = side.wrap(adam(model), model)
    train(side, model, optimizer, 4)
    side.close()
    return copies(model)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gather": "gradients"},
        {"schedule": "wfbp"},
        {"shards": (1, 2, 0, 3)},
        {"bucket_cap_mb": None},
        {"topology": "2x2/1x1"},
        {"topology": "2x2/3x1@0,2,1,3", "gather": "gradients"},
    ],
)
def test_a_grid_trains_as_one_process_does(settings: dict[str, Any], world: World) -> None:
    """Bit by bit the same on all ranks, and up to rounding what plain torch trains."""
    expected, found = trained(None), trained(world, **{"topology": "2x2", **settings})
    for name, values in expected.items():
        assert torch.allclose(found[name], values, rtol=1e-10, atol=1e-10)
    assert len(set(world.all_gather_text(str(fingerprint(found))))) == 1


def test_themis_sums_a_bucket_of_many_chunks_as_a_ring_does(world: World) -> None:
    """6 MB in fp64: both operations on one buffer, as a bucket goes, ten times over."""
    values = torch.randn(750_000, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    ways = [
        CollectiveAlgorithms("ring"),
        CollectiveAlgorithms("ring", grid=measured_grid(world, EngineConfig(topology="2x2/1x1"))),
    ]
    channel = world.open_channel("trial", window=2)
    for repeat in range(10):
        sums = [(values * (1 + world.rank + repeat)).clone() for _ in ways]
        for way, buffer in zip(ways, sums, strict=True):
            run_all(world, channel, [partial(way.start_reduce_scatter, buffer)])
            run_all(world, channel, [partial(way.start_all_gather, buffer)])
        assert torch.allclose(sums[0], sums[1], rtol=1e-10, atol=1e-10)
        assert len(set(world.all_gather_text(str(fingerprint({"sum": sums[1]}))))) == 1
    channel.close()


def test_sizes_that_do_not_fit_are_refused(world: World) -> None:
    model = layers()
    with raises(ConfigError, "topology-misfit", "2x3", "6", "4"):
        DistributedOptimizer(adam(model), model, world=world, topology="2x3")


def test_all_ranks_hold_what_the_dimensions_cost(world: World) -> None:
    """Ranks that are numbered anew meet in other lines, of which each is measured."""
    grid = measured_grid(world, EngineConfig(topology="2x2@0,2,1,3"))
    result = calibrate(world, CollectiveAlgorithms("ring"), budget_s=0.02, grid=grid)
    texts = world.all_gather_text(result.to_json())
    assert texts == [texts[0]] * world.size
    assert result.grid is not None and result.grid.topology == "2x2@0,2,1,3"
    assert [one.num_ranks for one in result.grid.dimensions] == [2, 2]
    assert 0 <= result.grid.hidden <= 1
    costs = result.grid_costs
    assert costs is not None and costs.reduce_scatter.alone_s(2**20) > 0


def test_collectives_by_dimensions_are_measured_beside_flat_ones(world: World) -> None:
    result = measure_collectives(world, [0.1], repeats=1, tell=lambda line: None, topology="2x2")
    names = [row.name for row in result.rows]
    assert result.topology == "2x2"
    predicted = {"reduce-scatter 2x2", "all-gather 2x2", "reduce-scatter ring", "all-gather ring"}
    assert predicted <= set(names)
    assert {row.name for row in result.rows if row.predicted_s} == predicted
    table = describe_collectives(result)[-len(names) - 1 :]
    assert "predicted" in table[0] and len(table[1].split()) == len(table[-1].split()) - 1
    with raises(ConfigError, "topology-misfit", "flat here", "4 ranks"):
        measured_grid(world, EngineConfig(topology="hosts"))  # which are one
