"""What gloo's all-reduces cost over a real network stack; the group is gone afterwards."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from benchmarks.all_reduce_cost import calibrate_all_reduce
from dearmpi.comm.world import World

pytestmark = pytest.mark.ranks(2, 3)


def test_an_all_reduce_has_a_cost_on_which_all_ranks_agree(world: World) -> None:
    link = calibrate_all_reduce(world, budget_s=0.5)
    assert world.all_gather_text(repr(link)) == [repr(link)] * world.size
    assert link.alone_s(2**20) > link.alone_s(2**10) > 0
    assert not dist.is_initialized()
