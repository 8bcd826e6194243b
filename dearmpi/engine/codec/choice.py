"""Which codec carries which bucket: dense, in half precision, quantized, or without its zeros."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dearmpi.comm.algorithms.registry import CollectiveAlgorithms
from dearmpi.config import EngineConfig
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.codec.codec import Codec, Codecs, DenseFirst, dense_codecs
from dearmpi.engine.codec.powersgd import power_codecs
from dearmpi.engine.codec.quantized import QuantizedGather, QuantizedReduce, Quantizer, quantizer_of
from dearmpi.engine.codec.selected import sparse_reduces
from dearmpi.engine.codec.sketch import exact_codecs


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
