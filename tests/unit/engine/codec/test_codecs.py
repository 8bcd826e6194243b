"""Codecs: what dense ones and those of half precision send, and one with a state of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from dearmpi import DistributedOptimizer, EngineConfig
from dearmpi.comm.algorithms.registry import CollectiveAlgorithms
from dearmpi.comm.api.collectives import Chain, Collectives, Completed, Request
from dearmpi.comm.world import World
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.bucket.buffers import Arena
from dearmpi.engine.codec.choice import choose_codecs
from dearmpi.engine.codec.codec import Codec, Codecs, DenseReduce
from dearmpi.engine.setup import build
from dearmpi.grid import Grid
from dearmpi.plan.data.layout import ParamSpec, build_layout, spec_of
from tests.fakes.ranks import run_ranks

SIZE = 4


def bucket_of(dtype: torch.dtype) -> BucketRuntime:
    param = nn.Parameter(torch.zeros(10, dtype=dtype))
    layout = build_layout([[spec_of(param, "p")]], SIZE)
    gradients, parameters = Arena(layout), Arena(layout, zeroed=False)
    return BucketRuntime(
        layout.buckets[0], [param], rank=0, gradients=gradients, parameters=parameters
    )


@pytest.mark.parametrize(
    ("dtype", "comm_dtype", "element_bytes"),
    [
        (torch.float32, None, 4),
        (torch.float64, None, 8),
        (torch.float32, "bf16", 2),
        (torch.float64, "fp16", 2),
        (torch.bfloat16, "fp16", 2),
    ],
)
def test_a_rank_sends_all_shards_but_one(
    dtype: torch.dtype, comm_dtype: Any, element_bytes: int
) -> None:
    """Of ten elements on four ranks: shards of three, the padding included."""
    codecs = choose_codecs(
        [bucket_of(dtype)], CollectiveAlgorithms("ring", comm_dtype), EngineConfig()
    )
    for codec in (*codecs.reduce, *codecs.gather):
        assert codec.sent_bytes == 3 * 3 * element_bytes
        assert not codec.owes


class Noted:
    """Notes by what each operation goes."""

    def __init__(self) -> None:
        self.ways: list[Any] = []

    def start_reduce_scatter(self, buffer: Any, algorithm: Any, **how: Any) -> Request:
        self.ways.append(algorithm)
        return Completed()

    start_all_gather = start_reduce_scatter


def test_buckets_even_out_a_grid_in_the_order_of_their_launch() -> None:
    """One chunk each; what is frozen does not travel."""
    specs = [ParamSpec(str(index), (160,)) for index in range(5)]
    specs[2] = replace(specs[2], trained=False)
    layout = build_layout([[spec] for spec in specs], 4)
    gradients, parameters = Arena(layout), Arena(layout, zeroed=False)
    buckets = [
        BucketRuntime(
            bucket,
            [nn.Parameter(torch.zeros(160), requires_grad=bucket.trained)],
            rank=0,
            gradients=gradients,
            parameters=parameters,
        )
        for bucket in layout
    ]
    grid = Grid((2, 2), (0, 1, 2, 3), rates=(1.0, 1.0))
    algorithms = CollectiveAlgorithms("ring", grid=grid)
    order: tuple[int, ...] = (4, 1, 2, 3, 0)
    noted: Any = Noted()
    codecs = choose_codecs(buckets, algorithms, EngineConfig(), order=order)
    for index in order:
        for codec in (codecs.reduce[index], codecs.gather[index]):
            codec.start(buckets[index], noted, 0)
    taken = [way.orders_for(1)[0] for way in noted.ways]
    assert taken[::2] == taken[1::2] == [(0, 1), (1, 0), (0, 1), (0, 1), (1, 0)]
    assert codecs.algorithms.grid == grid


class Rounded(DenseReduce):
    """Sends multiples of 1/4, and the rest in later steps."""

    def __init__(self, bucket: BucketRuntime, algorithms: CollectiveAlgorithms) -> None:
        super().__init__(bucket, algorithms)
        self.steps: list[int] = []
        self.rest = torch.zeros_like(bucket.gradients.data)

    def start(self, bucket: BucketRuntime, collectives: Collectives, step: int) -> Request:
        self.steps.append(step)
        return Chain(self._encode_and_reduce(bucket, collectives, step))

    def _encode_and_reduce(
        self, bucket: BucketRuntime, collectives: Collectives, step: int
    ) -> Iterator[Request]:
        data = bucket.gradients.data
        data.add_(self.rest)
        self.rest.copy_(data)
        data.mul_(4).round_().div_(4)
        self.rest.sub_(data)
        yield super().start(bucket, collectives, step)


def test_a_codec_of_ones_own_carries_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a state, by which nothing of a gradient is lost: all numbers here are exact."""
    made: list[Rounded] = []

    def choose(
        buckets: Sequence[BucketRuntime],
        algorithms: CollectiveAlgorithms,
        config: Any,
        *,
        order: Sequence[int],
    ) -> Codecs:
        dense = choose_codecs(buckets, algorithms, config)
        own = [Rounded(bucket, algorithms) for bucket in buckets]
        made.extend(own)
        codecs: tuple[Codec, ...] = tuple(own)
        return Codecs(codecs, dense.gather, algorithms)

    monkeypatch.setattr(build, "choose_codecs", choose)
    gradients = [[0.125 * (rank + 3 * step) for step in range(5)] for rank in range(2)]

    def rank(world: World) -> tuple[float, float]:
        model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(model.weight)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = DistributedOptimizer(inner, model, world=world)
        for gradient in gradients[world.rank]:
            optimizer.zero_grad()
            (model(torch.ones(1, 4)) * gradient).sum().backward()
            optimizer.step()
        optimizer.synchronize()
        moved = -float(model.weight.detach()[0, 0])
        world.barrier()
        rest = sum(float(codec.rest[0]) for codec in made)
        world.barrier()
        optimizer.close()
        return moved, rest

    outcomes = run_ranks(2, rank)
    assert outcomes[0] == outcomes[1]
    moved, rest = outcomes[0]
    assert rest and 2 * moved + rest == sum(map(sum, gradients))
    assert [codec.steps for codec in made] == [[0, 1, 2, 3, 4]] * 2
