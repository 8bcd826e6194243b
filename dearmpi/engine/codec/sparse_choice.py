"""Which sparse codec reduces a bucket, by kind, coordinates and scope."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from dearmpi.comm.algorithms.registry import CollectiveAlgorithms
from dearmpi.config import DEFAULT_DENSITY, EngineConfig
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.codec.largest import ModelShares, TopBlocks, TopElements
from dearmpi.engine.codec.residual import ErrorFeedback, GradientEstimate
from dearmpi.engine.codec.selected import OwnReduce, SharedReduce, selector_of
from dearmpi.engine.codec.sparse import RandomBlocks, RandomElements, SparseReduce, segments_of

_USUAL: Mapping[str, type[SparseReduce]] = {
    "random-block": RandomBlocks,
    "random-k": RandomElements,
    "topk": TopElements,
    "block-topk": TopBlocks,
}


def sparse_reduces(
    algorithms: CollectiveAlgorithms, config: EngineConfig
) -> Callable[[BucketRuntime], SparseReduce]:
    """What makes the sparse codec of a bucket, of the kind that ``config`` names."""
    return partial(_reduce_of, algorithms=algorithms, config=config, shares=ModelShares())


def _reduce_of(
    bucket: BucketRuntime,
    *,
    algorithms: CollectiveAlgorithms,
    config: EngineConfig,
    shares: ModelShares,
) -> SparseReduce:
    """``shares``: of all buckets."""
    size, choice, scratch = bucket.spec.world_size, config.error_feedback, algorithms.scratch
    feedback = ErrorFeedback(size, keeps=choice != "none")
    bucket.keeps_unused = choice != "ef21"
    if choice == "ef21":
        feedback = GradientEstimate(size)
    density, kind = config.density or DEFAULT_DENSITY, config.compress
    if config.scope == "model":
        return TopElements(
            bucket, algorithms, scratch, density=density, feedback=feedback, shares=shares
        )
    if config.has_usual_coordinates:
        usual = _USUAL[kind]
        return usual(bucket, algorithms, scratch, density=density, feedback=feedback)
    shards = segments_of(bucket, density=density, scope=config.scope or "bucket")
    if kind == "block-topk" and config.sent_coordinates == "shared":
        return TopBlocks(
            bucket, algorithms, scratch, density=density, feedback=feedback, shards=shards
        )
    selector = selector_of(kind, bucket.index, shards, scales=not feedback.keeps)
    carrier = OwnReduce if config.sent_coordinates == "own" else SharedReduce
    return carrier(
        bucket, algorithms, scratch, density=density, feedback=feedback, selector=selector
    )
