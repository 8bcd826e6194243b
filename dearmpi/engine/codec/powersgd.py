"""PowerSGD in half steps: of a matrix of gradients one factor travels, of a few columns.

A gradient, viewed as [rows, columns], is projected on a few orthonormal vectors that all ranks
share: of its rows in one step, and of its columns in the next. What travels is linear in the
gradient, so that one sum over the ranks is enough: its reduce-scatter is hidden behind backprop,
and its all-gather behind the next feed-forward. That sum, made orthonormal, is what the next step
projects on. What a projection leaves waits in each rank's residual (error feedback).

Source: "PowerSGD" (arXiv 1905.13727), in the form of one multiplication a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dearmpi.comm.algorithms.registry import CollectiveAlgorithms
from dearmpi.comm.api.collectives import Chain, Collectives, Completed, Request
from dearmpi.config import DEFAULT_POWERSGD_RANK, EngineConfig
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.codec.codec import StatelessCodec

_LEAST_RATIO = 2  # by which a factor is smaller than its matrix, else that travels as it is
_LEAST_NORM = 1e-8  # of a column beside the factor's largest number; below it is left out
_MOST_DRAWS = 3
_FAR_APART = 1 << 20  # seeds of two buckets


@dataclass(slots=True)
class Matrix:
    """A parameter that travels as a factor.

    place: its elements in the bucket's buffer. shape: (rows, columns). slot: its number.
    basis: what its gradient is projected on, [rank, rows] or, where ``turned``, [rank, columns].
    """

    place: slice
    shape: tuple[int, int]
    slot: int
    basis: Tensor
    turned: bool = False

    @property
    def length(self) -> int:
        """Of a row of its factor."""
        return self.shape[0 if self.turned else 1]

    def view(self, data: Tensor) -> Tensor:
        """Its elements of ``data``."""
        return data[self.place].view(self.shape)

    def project(self, data: Tensor, factor: Tensor) -> None:
        """Fill ``factor``, of ``rank`` rows."""
        matrix = self.view(data)
        torch.mm(self.basis, matrix.t() if self.turned else matrix, out=factor)

    def remove(self, data: Tensor, factor: Tensor, *, into: Tensor) -> None:
        """``into`` becomes ``data`` without what ``factor`` holds of it."""
        left, right = (factor, self.basis) if self.turned else (self.basis, factor)
        torch.addmm(self.view(data), left.t(), right, alpha=-1.0, out=self.view(into))

    def restore(self, factor: Tensor, *, into: Tensor) -> None:
        """``into`` becomes what ``factor`` holds."""
        left, right = (factor, self.basis) if self.turned else (self.basis, factor)
        torch.mm(left.t(), right, out=self.view(into))


class Factors:
    """What travels of a bucket: the factors of its matrices, behind all other elements.

    pays: whether that is less than half of the bucket. are_unpacked: whether the gradients are what
    the last factors have made.
    """

    def __init__(self, bucket: BucketRuntime, *, rank: int) -> None:
        """``rank``: rows of a factor, 1 or more."""
        spec = bucket.spec
        self._rank, self._index = rank, spec.index
        self._like = bucket.params[0].detach()
        self.matrices: list[Matrix] = []
        self._others: dict[int, slice] = {}  # by slot
        self._before: list[tuple[Tensor, bool]] | None = None  # bases of the iteration's start
        for slot, (placed, param) in enumerate(zip(spec.placements, bucket.params, strict=True)):
            place = slice(placed.start, placed.stop)
            rows = param.shape[0] if param.dim() > 1 else 1
            columns = max(1, param.numel() // max(1, rows))
            if min(rows, columns) >= _LEAST_RATIO * rank:
                empty = self._like.new_empty(0)
                self.matrices.append(Matrix(place, (rows, columns), slot, empty))
            else:
                self._others[slot] = place
        num_others = self._num_others()
        most = num_others + sum(max(matrix.shape) * rank for matrix in self.matrices)
        self.shard_numel = math.ceil(most / spec.world_size)
        self.numel = self.shard_numel * spec.world_size
        # The last ranks' shards may be shorter than the others'.
        least = spec.numel - (spec.world_size - 1) * spec.largest_shard
        self.pays = self.numel * _LEAST_RATIO <= spec.numel and self.shard_numel <= least
        self.sent_bytes = (spec.world_size - 1) * self.shard_numel * spec.itemsize
        self.are_unpacked = False
        if self.pays:
            self.restart()

    def restart(self) -> None:
        """Bases as they are at the start, alike on all ranks."""
        self._before = None
        for matrix in self.matrices:
            self._restart(matrix)

    def _restart(self, matrix: Matrix) -> None:
        matrix.turned = False
        generator = torch.Generator().manual_seed(_FAR_APART * self._index + matrix.slot)
        drawn = torch.randn(
            self._rank, matrix.shape[0], generator=generator, dtype=torch.float64, device="cpu"
        )
        matrix.basis = _orthonormal(drawn).to(self._like)

    def part_of(self, rank: int) -> slice:
        """The elements of what is sent that ``rank`` adds up."""
        return slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def pack(self, data: Tensor) -> Tensor:
        """What is to be sent of ``data``, [numel]."""
        sent = data.new_zeros(self.numel)
        at = 0
        for place in self._others.values():
            sent[at : (at := at + place.stop - place.start)].copy_(data[place])
        for matrix, factor in self._pairs(sent):
            matrix.project(data, factor)
        return sent

    def unpack(self, sent: Tensor, *, into: Tensor) -> Iterator[Request]:
        """``into`` becomes what was sent; a matrix at a time."""
        at = 0
        for place in self._others.values():
            into[place].copy_(sent[at : (at := at + place.stop - place.start)])
        for matrix, factor in self._pairs(sent):
            matrix.restore(factor, into=into)
            yield Completed()
        self.are_unpacked = True

    def keep_rest(self, data: Tensor, sent: Tensor, *, into: Tensor) -> Iterator[Request]:
        """``into`` becomes what of ``data`` is not in ``sent``; a matrix at a time."""
        for place in self._others.values():
            into[place].zero_()
        for matrix, factor in self._pairs(sent):
            matrix.remove(data, factor, into=into)
            yield Completed()

    def advance(self, sent: Tensor) -> None:
        """The next step's bases, from averages."""
        if self._before is None:
            self._before = [(matrix.basis, matrix.turned) for matrix in self.matrices]
        for matrix, factor in self._pairs(sent):
            if math.isfinite(float(factor.sum())):
                matrix.basis, matrix.turned = _orthonormal(factor), not matrix.turned
            else:
                self._restart(matrix)

    def confirm(self) -> None:
        """The step that has led to the bases counts."""
        self._before = None

    def go_back(self) -> None:
        """To the bases of the last step that counts."""
        for matrix, before in zip(self.matrices, self._before or (), strict=False):
            matrix.basis, matrix.turned = before
        self._before = None

    def pieces(self, own: Tensor, rank: int) -> Iterator[tuple[int, Tensor]]:
        """What ``own``, the sums of ``rank``, holds of each parameter, with its slot."""
        first, at = self.part_of(rank).start, 0
        numels = [(slot, place.stop - place.start) for slot, place in self._others.items()]
        numels += [(matrix.slot, self._rank * matrix.length) for matrix in self.matrices]
        for slot, numel in numels:
            start, stop = max(at - first, 0), min(at + numel - first, self.shard_numel)
            if start < stop:
                yield slot, own[start:stop]
            at += numel

    def _num_others(self) -> int:
        return sum(place.stop - place.start for place in self._others.values())

    def _pairs(self, sent: Tensor) -> Iterator[tuple[Matrix, Tensor]]:
        at = self._num_others()
        for matrix in self.matrices:
            part = sent[at : (at := at + self._rank * matrix.length)]
            yield matrix, part.view(self._rank, matrix.length)


class PowerReduce(StatelessCodec):
    """The sum of factors, which lies at the front of the own shard; zeros are behind it.

    Bases are orthonormal, so the shards' norm over all ranks is that of what will be restored.
    """

    keeps = True

    def __init__(self, algorithms: CollectiveAlgorithms, factors: Factors) -> None:
        self._algorithm, self._factors = algorithms, factors
        self._residual: Tensor | None = None
        self._next: Tensor | None = None
        self._before: tuple[Tensor | None, BucketRuntime, Tensor | None] | None = None
        self._is_reduced = self.owes = False
        self._is_finite = True
        self._own_rank = 0
        self._sent_square = self._next_square = 0.0  # of the last step, and of this iteration's
        self.sent_bytes = factors.sent_bytes

    def start(self, bucket: BucketRuntime, collectives: Collectives, step: int) -> Request:
        """Add the residual, and send the factors."""
        return Chain(self._steps(bucket, collectives))

    def _steps(self, bucket: BucketRuntime, collectives: Collectives) -> Iterator[Request]:
        data, own = bucket.gradients.data, bucket.gradients.shard
        data[bucket.spec.numel :].zero_()  # the padding may be anything
        if self._residual is not None:
            data.add_(self._residual)
        if bucket.owed is not None:
            data.add_(bucket.owed, alpha=bucket.loss_scale)
        if self._factors.are_unpacked and (carried := bucket.take_carried()) is not None:
            own.add_(carried, alpha=bucket.spec.world_size)  # of elements, and not of factors
        self._factors.are_unpacked = False
        sent = self._factors.pack(data)
        self._next_square = float(sent.square().sum())  # of a few numbers, which know of all
        self._is_finite = math.isfinite(self._next_square)
        total = sent.clone()
        yield self._algorithm.start_reduce_scatter(total, collectives)
        if self._next is None:
            self._next = torch.zeros_like(data)
        yield from self._factors.keep_rest(data, sent, into=self._next)
        own.zero_()
        own[: self._factors.shard_numel] = total[self._factors.part_of(collectives.rank)]
        self._own_rank, self._is_reduced = collectives.rank, True

    def commit(self, bucket: BucketRuntime, *, is_final: bool) -> None:
        """Of numbers that are not finite nothing is kept."""
        if is_final:
            self._before = None
            self._factors.confirm()
        elif self._before is None:
            kept = None if self._residual is None else self._residual.clone()
            self._before = kept, bucket, bucket.owed
        if not self._is_reduced:
            return
        assert self._next is not None
        self._is_reduced, self.owes, bucket.owed = False, True, None
        self._residual, self._next = self._next, self._residual
        self._sent_square = self._next_square
        if not self._is_finite:
            self._residual.nan_to_num_(0.0, 0.0, 0.0)

    def discard(self) -> None:
        """What was kept before the iteration stays."""
        self._is_reduced = False
        self._factors.go_back()
        if self._before is not None:
            self._residual, bucket, owed = self._before
            bucket.owed = owed
            self._before, self.owes = None, self._residual is not None

    def own_pieces(self, bucket: BucketRuntime) -> Iterator[tuple[int, Tensor]]:
        """Of factors, until these are gathered."""
        if self._factors.are_unpacked:
            return bucket.own_pieces()
        return self._factors.pieces(bucket.gradients.shard, self._own_rank)

    def squares(self) -> tuple[float, float]:
        """Bases are orthonormal, so a factor has the norm of what it stands for."""
        residual = self._residual  # the progress thread may replace it
        if residual is None:
            return 0.0, 0.0
        return float(torch.linalg.vector_norm(residual)) ** 2, self._sent_square

    def start_settling(self, bucket: BucketRuntime, collectives: Collectives) -> Request:
        """Bring the residuals' mean to all ranks, for their next reduction (collective)."""
        return Chain(self._settle(bucket, collectives))

    def _settle(self, bucket: BucketRuntime, collectives: Collectives) -> Iterator[Request]:
        residual = self._residual
        assert residual is not None
        self.forget()
        yield self._algorithm.start_reduce_scatter(residual, collectives)
        own = residual[bucket.spec.cuts.slice_of(collectives.rank)]
        own.div_(bucket.spec.world_size * bucket.loss_scale)
        yield self._algorithm.start_all_gather(residual, collectives)
        bucket.add_owed(residual)

    def forget(self) -> None:
        """Begin anew."""
        self._residual = self._next = self._before = None
        self._is_reduced = self.owes = False
        self._factors.restart()

    def rescale(self, factor: float) -> None:
        """Multiply the residual."""
        if self._residual is not None:
            self._residual.mul_(factor)


class PowerGather(StatelessCodec):
    """The averaged factors, of which each rank makes the bucket's gradients."""

    def __init__(self, algorithms: CollectiveAlgorithms, factors: Factors) -> None:
        self._algorithm, self._factors = algorithms, factors
        self.sent_bytes = factors.sent_bytes

    def start(self, bucket: BucketRuntime, collectives: Collectives, step: int) -> Request:
        """Gather the factors."""
        return Chain(self._steps(bucket, collectives))

    def _steps(self, bucket: BucketRuntime, collectives: Collectives) -> Iterator[Request]:
        factors, data = self._factors, bucket.gradients.data
        total = data.new_empty(factors.numel)
        own = bucket.gradients.shard[: factors.shard_numel]
        total[factors.part_of(collectives.rank)] = own
        yield self._algorithm.start_all_gather(total, collectives)
        yield from factors.unpack(total, into=data)
        factors.advance(total)


def power_codecs(
    bucket: BucketRuntime, algorithms: CollectiveAlgorithms, config: EngineConfig
) -> tuple[PowerReduce, PowerGather] | None:
    """Both ways of ``bucket``; None where factors are not small beside it."""
    factors = Factors(bucket, rank=config.powersgd_rank or DEFAULT_POWERSGD_RANK)
    if not factors.pays:
        return None
    bucket.travels_as_factors = True
    return PowerReduce(algorithms, factors), PowerGather(algorithms, factors)


def _orthonormal(rows: Tensor) -> Tensor:
    """An orthonormal basis whose space has that of ``rows``, [rank, length], in it.

    A row that adds nothing is drawn anew: it could never come back. The same input gives the same
    bits: by Gram-Schmidt in fp64, each row twice.
    """
    basis = rows.to(torch.float64, copy=True)
    largest = float(torch.linalg.vector_norm(basis, math.inf))
    generator = torch.Generator().manual_seed(0)
    for index, row in enumerate(basis):
        least = _LEAST_NORM * largest
        for _ in range(_MOST_DRAWS):
            for _ in range(2):
                row -= basis[:index].t() @ (basis[:index] @ row)
            norm = float(torch.linalg.vector_norm(row))
            if norm > least:
                row /= norm
                break
            drawn = torch.randn(len(row), generator=generator, dtype=torch.float64, device="cpu")
            row.copy_(drawn)
            least = _LEAST_NORM  # of numbers about 1
    return basis.to(rows.dtype)
