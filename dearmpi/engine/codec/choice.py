"""Which codec carries which bucket: dense, in half precision, quantized, or without its zeros."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dearmpi.comm.algorithms.registry import CollectiveAlgorithms
from dearmpi.config import EngineConfig
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.codec.codec import (
    Codec,
    DenseFirst,
    compresses,
    dense_codecs,
    elements_sent,
)
from dearmpi.engine.codec.powersgd import power_codecs
from dearmpi.engine.codec.quantized import QuantizedGather, QuantizedReduce, Quantizer, quantizer_of
from dearmpi.engine.codec.selected import sparse_reduces
from dearmpi.engine.codec.sketch import exact_codecs
from dearmpi.engine.trace.spans import Traffic
from dearmpi.plan.model.codec_cost import CodecCost


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

    def cost(self, compress: str, reduce_s: float, gather_s: float) -> CodecCost | None:
        """What compression costs of all that is trained; None where nothing is compressed.

        reduce_s, gather_s: seconds of a step in which codecs compute.
        """
        chosen = self.compressed
        dense = sum(elements_sent(bucket) * bucket.spec.itemsize for bucket in chosen)
        if not dense:
            return None
        nbytes = sum(bucket.spec.nbytes for bucket in chosen)
        return CodecCost(
            compress,
            sum(self.reduce[bucket.index].steady_bytes for bucket in chosen) / dense,
            sum(self.gather[bucket.index].steady_bytes for bucket in chosen) / dense,
            reduce_s / nbytes,
            gather_s / nbytes,
        )

    @property
    def compressed(self) -> list[BucketRuntime]:
        """Those of the trained buckets that do not travel whole in every step."""
        return [bucket for bucket in self.trained if compresses(self.reduce[bucket.index])]

    @property
    def traffic(self) -> Traffic:
        """Of all that is trained; where the bytes vary, of the last step."""
        known = [one for bucket in self.trained if (one := self.reduce[bucket.index].squares())]
        owed, sent = (sum(parts) for parts in zip(*known, strict=True)) if known else (0.0, 0.0)
        return Traffic(
            sum(self.reduce[bucket.index].sent_bytes for bucket in self.trained),
            sum(self.gather[bucket.index].sent_bytes for bucket in self.trained),
            2 * sum(elements_sent(one) * one.spec.itemsize for one in self.trained),
            owed / (owed + sent) if owed + sent > 0 else None,
            self.fallbacks,
        )

    @property
    def fallbacks(self) -> int:
        """Times so far that a bucket has travelled whole for want of something shorter."""
        return sum(codec.fallbacks for codec in (*self.reduce, *self.gather))


def choose_codecs(
    buckets: Sequence[BucketRuntime],
    algorithms: CollectiveAlgorithms,
    config: EngineConfig,
    *,
    order: Sequence[int] = (),
) -> Codecs:
    """Codecs by the settings; what is of half precision already travels as it is.

    order: in which buckets are reduced. On a grid with rates those that travel whole are carried so
    that all of them together even out its dimensions.
    """
    quantizer, sparse = quantizer_of(config.compress), sparse_reduces(algorithms, config)
    whole = [buckets[index] for index in order if not buckets[index].is_compressed(config)]
    trained_whole = [bucket for bucket in whole if bucket.spec.trained]
    sent = [(one.spec.cuts, one.spec.itemsize) for one in trained_whole]
    ways = dict(zip(trained_whole, algorithms.carrying(sent), strict=True))
    pairs = [
        _choose(bucket, ways.get(bucket, algorithms), config, quantizer, sparse)
        for bucket in buckets
    ]
    trained = tuple(bucket for bucket in buckets if bucket.spec.trained)
    reduce, gather = tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)
    return Codecs(reduce, gather, algorithms, trained)


def _choose(
    bucket: BucketRuntime,
    algorithms: CollectiveAlgorithms,
    config: EngineConfig,
    quantizer: Quantizer,
    sparse: Callable[[BucketRuntime], Codec],
) -> tuple[Codec, Codec]:
    """By which ``bucket`` is reduced, and gathered."""
    how = config.gather
    dense = dense_codecs(bucket, algorithms, gather=how)
    if not bucket.is_compressed(config):
        return dense
    if not config.is_lossy:
        return exact_codecs(bucket, algorithms, config)
    gather: Codec = QuantizedGather(bucket, quantizer, algorithms.scratch, gather=how)
    reduce: Codec = QuantizedReduce(bucket, quantizer, algorithms.scratch)
    if config.is_sparse:
        reduce = sparse(bucket)
    elif config.compress == "powersgd":
        pair = power_codecs(bucket, algorithms, config)
        if pair is None:
            return dense
        reduce, gather = pair
    if not (num := config.compress_after):
        return reduce, gather
    return (
        DenseFirst(reduce, dense[0], num_steps=num),
        DenseFirst(gather, dense[1], num_steps=num),
    )
