"""Which codec carries which bucket: dense, in half precision, quantized, or without its zeros."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dearmpi.comm.algorithms.registry import CollectiveAlgorithms
from dearmpi.comm.algorithms.scratch import Scratch
from dearmpi.config import DEFAULT_DENSITY, EngineConfig
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.codec.codec import (
    Codec,
    DenseGather,
    DenseReduce,
    HalfGather,
    HalfReduce,
    elements_sent,
)
from dearmpi.engine.codec.nonzero import NonzeroGather, NonzeroReduce
from dearmpi.engine.codec.quantized import QuantizedGather, QuantizedReduce, quantizer_of
from dearmpi.engine.codec.sparse import RandomBlocks, RandomElements
from dearmpi.engine.trace.spans import Traffic
from dearmpi.engine.update.master import is_half


@dataclass(frozen=True, slots=True)
class Codecs:
    """By bucket: how its gradients are reduced, and how its shards are gathered.

    algorithms: by which dense ones travel, and those of half precision. trained: the buckets that
    are.
    """

    reduce: tuple[Codec, ...]
    gather: tuple[Codec, ...]
    algorithms: CollectiveAlgorithms
    trained: tuple[BucketRuntime, ...] = ()

    @property
    def traffic(self) -> Traffic:
        """Of all that is trained; where the bytes vary, of the last step."""
        return Traffic(
            sum(self.reduce[bucket.index].sent_bytes for bucket in self.trained),
            sum(self.gather[bucket.index].sent_bytes for bucket in self.trained),
            2 * sum(elements_sent(one) * one.spec.itemsize for one in self.trained),
        )


def choose_codecs(
    buckets: Sequence[BucketRuntime], algorithms: CollectiveAlgorithms, config: EngineConfig
) -> Codecs:
    """Codecs by the settings; what is of half precision already travels as it is."""
    quantizer, scratch, how = quantizer_of(config.compress), Scratch(), config.gather
    reduce: list[Codec] = []
    gather: list[Codec] = []
    for bucket in buckets:
        if bucket.is_compressed(config) and not config.is_lossy:
            reduce.append(NonzeroReduce(bucket, algorithms, scratch))
            gather.append(NonzeroGather(bucket, scratch, gather=how))
        elif bucket.is_compressed(config) and config.is_sparse:
            sparse = RandomBlocks if config.compress == "random-block" else RandomElements
            density = config.density or DEFAULT_DENSITY
            reduce.append(sparse(bucket, algorithms, scratch, density=density))
            gather.append(QuantizedGather(bucket, quantizer, scratch, gather=how))
        elif bucket.is_compressed(config):
            reduce.append(QuantizedReduce(bucket, quantizer, scratch))
            gather.append(QuantizedGather(bucket, quantizer, scratch, gather=how))
        elif algorithms.wire_dtype is None or is_half(bucket.params[0]):
            reduce.append(DenseReduce(bucket, algorithms))
            gather.append(DenseGather(bucket, algorithms, gather=how))
        else:
            reduce.append(HalfReduce(bucket, algorithms))
            gather.append(HalfGather(bucket, algorithms, gather=how))
    trained = tuple(bucket for bucket in buckets if bucket.spec.trained)
    return Codecs(tuple(reduce), tuple(gather), algorithms, trained)
