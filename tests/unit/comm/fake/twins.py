"""A communicator of every in-process rank, driven by the test itself."""

from __future__ import annotations

import torch
from torch import Tensor

from dearmpi.comm.api.collectives import Collectives, Request
from tests.fakes import FakeCollectives, FakeHub


def channels(hub: FakeHub) -> list[Collectives]:
    """A duplicated communicator of every rank, driven by the test itself."""
    pairs = [FakeCollectives(hub, rank).start_duplicate() for rank in range(hub.size)]
    assert all(request.test() for _, request in pairs)
    return [twin for twin, _ in pairs]


def gather_all(hub: FakeHub, numel: int = 4) -> tuple[list[Tensor], list[Request]]:
    buffers = [torch.full((numel,), float(rank)) for rank in range(hub.size)]
    return buffers, [
        c.start_all_gather(buffer) for c, buffer in zip(channels(hub), buffers, strict=True)
    ]
