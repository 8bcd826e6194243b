"""Training on a grid of ranks: what flat collectives train, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.errors import ConfigError
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
    ],
)
def test_a_grid_trains_as_one_process_does(settings: dict[str, Any], world: World) -> None:
    """Bit by bit the same on all ranks, and up to rounding what plain torch trains."""
    expected, found = trained(None), trained(world, topology="2x2", **settings)
    for name, values in expected.items():
        assert torch.allclose(found[name], values, rtol=1e-10, atol=1e-10)
    assert len(set(world.all_gather_text(str(fingerprint(found))))) == 1


def test_sizes_that_do_not_fit_are_refused(world: World) -> None:
    model = layers()
    with raises(ConfigError, "topology-misfit", "2x3", "6", "4"):
        DistributedOptimizer(adam(model), model, world=world, topology="2x3")
