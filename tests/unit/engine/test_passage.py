"""Passage: what is polled how eagerly while a device and the network take their turns."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from dearmpi.comm.api import Request
from dearmpi.comm.fake import FakeHub
from dearmpi.comm.lane import Lane, Work
from dearmpi.engine.span import Lane as Track
from dearmpi.engine.spans import Spans
from dearmpi.plan.layout import ParamSpec, build_layout
from tests.lazy_device import HostStream
from tests.unit.engine.device_rank import SIZE, Rank
from tests.unit.engine.heard import Heard

BUCKET = build_layout([[ParamSpec("weight", (4,))]], SIZE).buckets[0]


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("watched", [False, True])
def test_polling_is_eager_again_once_the_device_has_come_so_far(
    watched: bool, direct: bool
) -> None:
    """By then the host sleeps long, as it has waited for the device; the network may be quick."""
    rank, late, spans = Rank(FakeHub(SIZE), 0, direct=direct), HostStream(), Spans()
    spans.recorder = Heard() if watched else None
    buffer = torch.ones(4)
    late.is_open = False
    rank.side.written(buffer, [late])
    lane = Lane("all-gather", window=1)

    def start() -> Request:
        gather = partial(rank.collectives.start_all_gather, buffer)
        return spans.operation(Track.ALL_GATHER, BUCKET, gather)

    lane.queue.append(Work("AG0", start, lambda: None))
    assert lane.advance()
    assert not any(lane.advance() for _ in range(20))
    late.is_open = True
    assert any(lane.advance() for _ in range(3))  # posted, but the other rank has not come yet
    assert not any(lane.advance() for _ in range(20)) and lane.in_flight
