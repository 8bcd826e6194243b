"""What a codec costs: its bytes, and how long its ranks compute, with nothing on the wire."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dearmpi.comm.algorithms.registry import CollectiveAlgorithms
from dearmpi.comm.api.collectives import Completed, Request
from dearmpi.comm.world import World
from dearmpi.config import EngineConfig
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.bucket.buffers import Arena
from dearmpi.engine.codec.choice import choose_codecs
from dearmpi.engine.codec.codec import Codec, elements_sent
from dearmpi.plan.data.layout import build_layout, spec_of
from dearmpi.plan.model.codec_cost import CodecCost, require_known_bytes

_NUMEL = 1 << 20
_NUM_ROUNDS = 6  # the first has to find memory, and thresholds


class _Mirror:
    """Collectives of one rank, as if all others had what it has; they are complete at once.

    spent_s: for which it has copied, in the others' place.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self._size, self.spent_s = rank, size, 0.0

    def reserve(self) -> AbstractContextManager[None]:
        return nullcontext()

    def start_reduce_scatter(self, buffer: Tensor, *_: Any, **__: Any) -> Request:
        return Completed()

    def start_all_gather(self, buffer: Tensor, *_: Any, **__: Any) -> Request:
        rows = buffer.view(self._size, -1)
        return self._copy(rows, rows[self.rank].clone().expand_as(rows))

    def start_exchange(self, sent: Tensor, arrived: Tensor, **_: Any) -> Request:
        return self._copy(arrived, sent)

    def _copy(self, into: Tensor, source: Tensor) -> Request:
        begin_s = time.perf_counter()
        into.copy_(source)
        self.spent_s += time.perf_counter() - begin_s
        return Completed()


def measure_codec(world: World, config: EngineConfig) -> CodecCost:
    """What ``config.compress`` costs between the ranks of ``world``, all of which compute at once,
    as in training; the slowest counts (collective).

    Raises ConfigError for a codec whose bytes follow from the numbers that travel.
    """
    require_known_bytes(config.compress)
    reduced, gathered, *seconds = _measure(config, rank=world.rank, size=world.size)
    reduce_s, gather_s = world.all_reduce(seconds, "max")
    return CodecCost(
        config.compress,
        reduced,
        gathered,
        reduce_s / (4 * _NUMEL),
        gather_s / (4 * _NUMEL),
        density=config.sent_density,
    )


def _measure(config: EngineConfig, *, rank: int, size: int) -> Sequence[float]:
    """Shares of the dense bytes, and seconds, of a reduce-scatter and of an all-gather."""
    drawn = torch.randn(_NUMEL, generator=torch.Generator().manual_seed(rank), device="cpu")
    param = nn.Parameter(torch.zeros(_NUMEL, device="cpu"))
    layout = build_layout([[spec_of(param, "all")]], size)
    arenas = Arena(layout), Arena(layout)
    bucket = BucketRuntime(
        layout.buckets[0], [param], rank=rank, gradients=arenas[0], parameters=arenas[1]
    )
    bucket.keep_shown()
    codecs = choose_codecs([bucket], CollectiveAlgorithms("ring"), config)
    reduce, gather = codecs.reduce[0], codecs.gather[0]
    least = [float("inf")] * 2
    assert bucket.parameters is not None and bucket.shown is not None
    for step in range(_NUM_ROUNDS):
        bucket.gradients.data[:_NUMEL] = drawn
        reduce_s = _run(reduce, bucket, _Mirror(rank, size), step)
        begin_s = time.perf_counter()
        reduce.commit(bucket, is_final=True)
        reduce_s += time.perf_counter() - begin_s
        bucket.shown.copy_(bucket.parameters.shard)
        bucket.parameters.shard.add_(bucket.gradients.shard, alpha=1e-3)
        gather_s = _run(gather, bucket, _Mirror(rank, size), step)
        least = [min(pair) for pair in zip(least, (reduce_s, gather_s), strict=True)]
    dense = elements_sent(bucket) * bucket.spec.itemsize
    return (reduce.sent_bytes / dense, gather.sent_bytes / dense, *least)


def _run(codec: Codec, bucket: BucketRuntime, mirror: Any, step: int) -> float:
    """Seconds in which it computes."""
    begin_s = time.perf_counter()
    request = codec.start(bucket, mirror, step)
    while not request.test():
        pass
    spent_s: float = time.perf_counter() - begin_s - mirror.spent_s
    return max(spent_s, 0.0)
