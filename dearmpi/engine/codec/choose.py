"""Which codecs the buckets of one engine have, as the settings ask or as a trial has found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dearmpi.comm.algorithms.registry import CollectiveAlgorithms, select_reduce_scatter
from dearmpi.comm.world import World
from dearmpi.config import EngineConfig
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.codec.codec import Codec, DenseGather, DenseReduce, HalfGather, HalfReduce
from dearmpi.engine.device.accelerator import zeros
from dearmpi.engine.device.comm_stream import CommStream
from dearmpi.engine.update.master import is_half


@dataclass(frozen=True, slots=True)
class Codecs:
    """By bucket: how its gradients are reduced, and how its shards are gathered.

    algorithms: by which all of them travel.
    """

    reduce: tuple[Codec, ...]
    gather: tuple[Codec, ...]
    algorithms: CollectiveAlgorithms


def choose_codecs(
    buckets: Sequence[BucketRuntime], algorithms: CollectiveAlgorithms, config: EngineConfig
) -> Codecs:
    """Codecs by the settings; what is of half precision already travels as it is."""
    reduce: list[Codec] = []
    gather: list[Codec] = []
    for bucket in buckets:
        if algorithms.wire_dtype is None or is_half(bucket.params[0]):
            reduce.append(DenseReduce(bucket, algorithms))
            gather.append(DenseGather(bucket, algorithms, gather=config.gather))
        else:
            reduce.append(HalfReduce(bucket, algorithms))
            gather.append(HalfGather(bucket, algorithms, gather=config.gather))
    return Codecs(tuple(reduce), tuple(gather), algorithms)


def choose_algorithms(
    world: World, buckets: Sequence[BucketRuntime], config: EngineConfig, comm_stream: CommStream
) -> CollectiveAlgorithms:
    """The algorithms that the settings ask for, or those that are fastest on the way that gradients
    take (collective).
    """
    wire_dtype = config.wire_dtype if world.size > 1 else None  # one rank rounds nothing
    if config.reduce_scatter != "auto":
        return CollectiveAlgorithms(config.reduce_scatter, wire_dtype)
    largest = max(buckets, key=lambda bucket: (bucket.spec.trained, bucket.spec.nbytes))
    # Not its own buffer, which it may never need.
    buffer = zeros(largest.spec.padded_numel, largest.params[0])
    comm_stream.wait_for_current()  # it is new
    # Of half precision MPI has no portable sum, of torch's complex numbers none that is asked for.
    dtypes = {placed.spec.dtype for bucket in buckets for placed in bucket.spec.placements}
    fastest = select_reduce_scatter(
        world,
        buffer,
        wire_dtype=config.wire_dtype,
        library_can_add=dtypes <= {"float32", "float64"},
        wrap=comm_stream.wrap_for_device,
    )
    return CollectiveAlgorithms(fastest, wire_dtype)
