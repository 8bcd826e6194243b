"""Sparse codecs whose coordinates a selector chooses: shared or own, of shards or of parameters.

Settings of "Sparse Communication for Training Deep Networks" (arXiv 2009.09271). Coordinates are
shared, and values are added up as a short bucket; or each rank has its own, and owners add what is
exchanged. A share is sent of each shard, or of each parameter. Largest elements
that all ranks send are those of the shard's owner, which alone tells the others.

``sparse_reduces`` chooses the sparse codec of a bucket by kind, coordinates and scope.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from dearmpi.comm.algorithms.registry import CollectiveAlgorithms
from dearmpi.comm.algorithms.scratch import Scratch
from dearmpi.comm.api.collectives import Collectives, Request
from dearmpi.config import DEFAULT_DENSITY, EngineConfig
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.codec.largest import (
    ALIGNMENT,
    COUNTS_BYTES,
    INDEX_BYTES,
    HeaviestBlocks,
    LargestElements,
    ModelShares,
    TopBlocks,
    count_magnitudes,
)
from dearmpi.engine.codec.residual import ErrorFeedback, GradientEstimate
from dearmpi.engine.codec.sparse import (
    RandomBlocks,
    RandomElements,
    Segment,
    Selector,
    SparseReduce,
    segments_of,
)

_AT_ONCE: Mapping[str, type[SparseReduce]] = {  # the same of all shards, for less time
    "random-block": RandomBlocks,
    "random-k": RandomElements,
}

_ALL_RANKS = -1  # in place of a rank, where all choose alike


class DrawnElements(Selector):
    """One element of each of equal stretches of a segment, by chance. scales: their sums."""

    is_told = False

    def __init__(self, index: int, shards: Sequence[Sequence[Segment]], *, scales: bool) -> None:
        super().__init__(index, shards)
        self._scales = scales

    def choose_in(
        self, values: Tensor, segment: Segment, key: tuple[int, int, int], turn: int
    ) -> Tensor:
        """By a seed of the step."""
        seed = random.Random(f"{self.index} {key} {turn}").getrandbits(62)
        generator = torch.Generator().manual_seed(seed)
        length = segment.stop - segment.start
        bounds = torch.arange(segment.num + 1, device="cpu") * length // segment.num
        first, width = bounds[:-1], bounds.diff()
        drawn = torch.rand(segment.num, generator=generator, dtype=torch.float64, device="cpu")
        return first + (drawn * width).long()

    def weights(self, shard: int) -> Tensor | None:
        """How many elements there are for each that is sent."""
        if not self._scales:
            return None
        found = [one for one in self.shards[shard] for _ in range(one.num)]
        parts = [(one.stop - one.start) / one.num for one in found]
        parts += [1.0] * (self.num - len(parts))
        return torch.tensor(parts, dtype=torch.float32, device="cpu")


class BlocksInTurn(Selector):
    """A stretch of each segment in turn, in an order that is drawn anew once all had theirs."""

    is_told = False

    def __init__(self, index: int, shards: Sequence[Sequence[Segment]]) -> None:
        super().__init__(index, shards)
        self._orders: dict[tuple[int, int, int], tuple[int, list[int]]] = {}

    def choose_in(
        self, values: Tensor, segment: Segment, key: tuple[int, int, int], turn: int
    ) -> Tensor:
        """By a seed of the sweep; the last stretch may be shorter."""
        length = segment.stop - segment.start
        num = math.ceil(length / segment.num)
        sweep, place = divmod(turn, num)
        if self._orders.get(key, (-1, []))[0] != sweep:
            order = list(range(num))
            random.Random(f"{self.index} {key} {sweep}").shuffle(order)
            self._orders[key] = sweep, order
        start = self._orders[key][1][place] * segment.num
        return torch.arange(start, min(start + segment.num, length), device="cpu")


class SelectedReduce(SparseReduce):
    """The sum of what a selector chooses.

    alignment, more_bytes: of a message for one rank, behind values, flags and indexes; in bytes.
    """

    alignment = 1
    more_bytes = 0

    def __init__(
        self,
        bucket: BucketRuntime,
        algorithms: CollectiveAlgorithms,
        scratch: Scratch,
        *,
        density: float,
        feedback: ErrorFeedback,
        selector: Selector,
    ) -> None:
        """As ``SparseReduce``."""
        super().__init__(bucket, algorithms, scratch, density=density, feedback=feedback)
        self.selector = selector
        self.lay_out(bucket.spec.itemsize)

    def lay_out(self, itemsize: int) -> None:
        """Messages for what the selector chooses from now on, of elements of ``itemsize`` bytes."""
        selector = self.selector
        self.num_sent = selector.num * selector.block
        self._value_bytes = (self.num_sent + self.num_flags) * itemsize
        self._index_bytes = selector.num * INDEX_BYTES if selector.is_told else 0
        unaligned = self._value_bytes + self._index_bytes + self.more_bytes
        self._num_bytes = -(-unaligned // self.alignment) * self.alignment
        self.sparse_bytes = (self._size - 1) * self._num_bytes

    def choose(self, rows: Tensor, *, rank: int, finite: bool) -> Tensor:
        """Blocks by shard, [size, num]."""
        if not finite and self.selector.is_told:
            return torch.zeros(len(rows), self.selector.num, dtype=torch.int64, device="cpu")
        chosen = [
            self.selector.choose(row, shard, rank=rank, turn=self.turn)
            for shard, row in enumerate(rows)
        ]
        return torch.stack(chosen)

    def elements(self, blocks: Tensor) -> Tensor:
        """Of blocks, whose first ones are given, [..., num] to [..., num_sent]."""
        if self.selector.block == 1:
            return blocks
        within = torch.arange(self.selector.block, device="cpu")
        return (blocks[..., None] + within).flatten(-2)


class SharedReduce(SelectedReduce):
    """All ranks send the same elements, which are added up as a short bucket."""

    def reduce(
        self, rows: Tensor, collectives: Collectives, *, finite: bool
    ) -> Generator[Request, None, float]:
        """Gather the owners' choices, unless they follow from the step; reduce what is chosen."""
        own, to_values = collectives.rank, None
        if self.selector.is_told:
            to_values = collectives.reserve()
            choices = torch.zeros(len(rows), self.selector.num, dtype=torch.int32, device="cpu")
            if finite:
                choices[own] = self.selector.choose(rows[own], own, rank=own, turn=self.turn)
            yield collectives.start_all_gather(choices.view(-1), "ring")
            places = self.elements(choices.long())
        else:
            places = self.elements(self.choose(rows, rank=_ALL_RANKS, finite=finite))
        weights = self.selector.weights(own)
        return (
            yield from self.add_up(
                rows, places, collectives, finite=finite, weights=weights, reserved=to_values
            )
        )


class OwnReduce(SelectedReduce):
    """Each rank sends elements of its own, which their owner adds in the order of ranks.

    Own coordinates suit a reduce-scatter: an owner adds what arrives wherever it lies, while one
    choice for all would cost an exchange before.
    """

    alignment = ALIGNMENT

    def reduce(
        self, rows: Tensor, collectives: Collectives, *, finite: bool
    ) -> Generator[Request, None, float]:
        """Encode and exchange at once, since operations in flight are told apart by their order;
        add when the parts have come.
        """
        size, each, own = len(rows), self._num_bytes, collectives.rank
        message = torch.empty(0, dtype=torch.uint8, device="cpu")
        held = [self.scratch.take(message, size * each) for _ in range(2)]
        sent, arrived = (buffer[: size * each].view(size, -1) for buffer in held)
        blocks = self.choose(rows, rank=own, finite=finite)
        places, own_flag = self.elements(blocks), self.feedback.flag
        for row, chosen, first, part in zip(rows, places, blocks, sent, strict=True):
            values = self._values(part, rows.dtype)
            if finite:
                torch.index_select(row, 0, chosen, out=values[: self.num_sent])
                if (repeats := _repeats(chosen)) is not None:
                    values[: self.num_sent][repeats] = 0.0
                values[self.num_sent :] = own_flag
            else:
                values.fill_(math.nan)
            if self.selector.is_told:
                self._indexes(part).copy_(first)
        self.add_more(rows, sent, finite=finite)
        yield collectives.start_exchange(sent.view(-1), arrived.view(-1))
        arrived[own] = sent[own]
        total = self.feedback.hold(rows, own, (torch.arange(size)[:, None], places))
        flag, weights = 0.0, self.selector.weights(own)
        for rank, part in enumerate(arrived):
            if self.selector.is_told:
                chosen = self._indexes(part)
            else:
                chosen = self.selector.choose(total, own, rank=rank, turn=self.turn)
            values = self._values(part, rows.dtype)
            sums = values[: self.num_sent]
            total.index_add_(0, self.elements(chosen), sums if weights is None else sums * weights)
            flag += float(values[self.num_sent :].sum())
        self.take_more(arrived)
        for buffer in held:
            self.scratch.give_back(buffer)
        return flag

    def add_more(self, rows: Tensor, sent: Tensor, *, finite: bool) -> None:
        """Write what else is ``sent`` of ``rows``, in messages by rank."""

    def take_more(self, arrived: Tensor) -> None:
        """Read what else has ``arrived``, in messages by rank."""

    def _values(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        """With the flag behind them."""
        return message[: self._value_bytes].view(dtype)

    def _indexes(self, message: Tensor) -> Tensor:
        """Of blocks, as int32."""
        end = self._value_bytes + self._index_bytes
        return message[self._value_bytes : end].view(torch.int32)


class LargestOfModel(OwnReduce):
    """The largest elements of a whole model: how many are of this bucket follows from the step."""

    more_bytes = COUNTS_BYTES
    selector: LargestElements

    def __init__(
        self,
        bucket: BucketRuntime,
        algorithms: CollectiveAlgorithms,
        scratch: Scratch,
        *,
        density: float,
        feedback: ErrorFeedback,
        selector: LargestElements,
        shares: ModelShares,
    ) -> None:
        """As ``SparseReduce``. ``shares``: of all buckets."""
        super().__init__(
            bucket, algorithms, scratch, density=density, feedback=feedback, selector=selector
        )
        self._shares, self._steady_bytes = shares, self.sparse_bytes
        shares.add(self.index, usual=self.num_sent, most=self.numel)

    @property
    def steady_bytes(self) -> int:
        """Of a bucket whose share of the model's largest is the usual one."""
        return self._steady_bytes

    def start(self, bucket: BucketRuntime, collectives: Collectives, step: int) -> Request:
        """Learn how many elements are sent in this step."""
        self.selector.resize(self._shares.of(self.index, step))
        self.lay_out(bucket.spec.itemsize)
        return super().start(bucket, collectives, step)

    def add_more(self, rows: Tensor, sent: Tensor, *, finite: bool) -> None:
        """Of this rank, how many magnitudes its whole bucket has of each size."""
        self._counts(sent).copy_(count_magnitudes(rows.view(-1), finite=finite))

    def take_more(self, arrived: Tensor) -> None:
        """The same of all ranks, by which later steps go."""
        self._shares.note(self.index, self._counts(arrived).sum(0) / len(arrived) ** 2)

    def start_settling(self, bucket: BucketRuntime, collectives: Collectives) -> Request:
        """Begin with the usual shares, as a resumed run does."""
        self._shares.reset()
        return super().start_settling(bucket, collectives)

    def forget(self) -> None:
        """Begin anew."""
        self._shares.reset()
        super().forget()

    def _counts(self, messages: Tensor) -> Tensor:
        start = self._value_bytes + self._index_bytes
        return messages[:, start : start + COUNTS_BYTES].view(torch.float32)


def _repeats(places: Tensor) -> Tensor | None:
    """Flags of those that have come before among ascending ``places``, some of which step back;
    None where all ascend.
    """
    if not bool((places[1:] <= places[:-1]).any()):
        return None
    flags = torch.zeros(len(places), dtype=torch.bool, device="cpu")
    flags[1:] = places[1:] <= places.cummax(0).values[:-1]
    return flags


_SELECTORS: Mapping[str, type[Selector]] = {
    "random-block": BlocksInTurn,
    "topk": LargestElements,
    "block-topk": HeaviestBlocks,
}


def selector_of(
    kind: str, index: int, shards: Sequence[Sequence[Segment]], *, scales: bool
) -> Selector:
    """By the name of the kind; ``scales``: sums of ``random-k``, where nothing is kept."""
    if kind == "random-k":
        return DrawnElements(index, shards, scales=scales)
    return _SELECTORS[kind](index, shards)


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
    if config.has_usual_coordinates and kind in _AT_ONCE:
        reduce = _AT_ONCE[kind]
        return reduce(bucket, algorithms, scratch, density=density, feedback=feedback)
    shards = segments_of(bucket, density=density, scope=config.scope or "bucket")
    if kind == "block-topk" and config.sent_coordinates == "shared":
        return TopBlocks(
            bucket, algorithms, scratch, density=density, feedback=feedback, shards=shards
        )
    if config.scope == "model":
        return LargestOfModel(
            bucket,
            algorithms,
            scratch,
            density=density,
            feedback=feedback,
            selector=LargestElements(bucket.index, shards),
            shares=shares,
        )
    selector = selector_of(kind, bucket.index, shards, scales=not feedback.keeps)
    carrier = OwnReduce if config.sent_coordinates == "own" else SharedReduce
    return carrier(
        bucket, algorithms, scratch, density=density, feedback=feedback, selector=selector
    )
