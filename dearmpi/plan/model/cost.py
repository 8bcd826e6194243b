"""Cost: how long a collective, an update and a bucket's handling take.

A collective of n bytes that is alone on the wire takes ``alpha + beta * n``. For the share
``wire_share * beta * n / (alpha + beta * n)`` of that time it has something on the wire; in the
rest it waits for messages to start, for the slowest rank, for a sum. That rest is what a second
operation in flight fills (``plan/simulate/flow.py``): two alike take about as long as either alone,
or as long as the wire needs for the bytes of both, whichever is more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from dearmpi.config import CommDtype, ReduceScatter
from dearmpi.errors import ConfigError
from dearmpi.plan.data.layout import ParamSpec
from dearmpi.plan.model.codec_cost import CodecCost

Sample = tuple[float, float]
"""Bytes, and the seconds that they took."""

MOST_RANKS = 1 << 20

_HALF_BYTES, _FP32_BYTES = 2, 4
LEAST_WIRE_SHARE = 0.5  # two operations in flight cannot be faster than one of them alone
_FULL_WIRE = 1.25  # so much longer than one alone, two operations in flight have filled the wire
MOST_S = 1e12
"""The longest time that is taken for one: sums and squares of such fit into floats."""

_MOST_COST = 1e20  # s, or s per byte: MOST_S at MOST_RANKS is less, and with bytes it stays finite
_MOST_BYTES, _LEAST_S = 1e18, 1e-12  # of a sample
_NUM_REWEIGHTINGS = 30
# What a bucket costs whatever it holds. The main thread hands it over in 0.1 ms, but competes for
# the interpreter and for cores with 2 ms of posting, polling and updating
# (docs/contributing/log.md).
_TYPICAL_MAIN_THREAD_S = 1e-3
_TYPICAL_UPDATE_S = 1e-3
_HUBER = 1.345  # standard deviations beyond which a sample counts less (Huber, 1964)


@dataclass(frozen=True, slots=True)
class AlgorithmCost:
    """Cost of a reduce-scatter, and of the all-gather that belongs to it, by the number of ranks.

    num_rounds: messages that follow each other; each adds a start-up to the time.
    sent_share: the part of the buffer that each rank sends.
    """

    num_rounds: Callable[[int], int]
    sent_share: Callable[[int], float]


# P - 1 rounds, in each of which every rank sends one shard (Patarasuk and Yuan, 2009). A ring does
# so, and so do MPICH's own algorithms for large buffers and an exchange of shards.
_PAIRWISE = AlgorithmCost(lambda size: size - 1, lambda size: (size - 1) / size)

# Each entry stands beside the one of the same name in comm/algorithms/registry.py.
ALGORITHM_COSTS: dict[ReduceScatter, AlgorithmCost] = {
    "native": _PAIRWISE,
    "ring": _PAIRWISE,
    "exchange": _PAIRWISE,
}


@dataclass(frozen=True, slots=True)
class LinkModel:
    """Time of one kind of collective at one world size.

    alpha_s: start-up latency, of all rounds together.
    beta_s_per_byte: per byte of the whole buffer, of which each rank sends (P - 1) / P.
    wire_share: the part of ``beta_s_per_byte`` for which the wire is taken, 0.5 to 1.
    """

    alpha_s: float
    beta_s_per_byte: float
    wire_share: float = 1.0

    def __post_init__(self) -> None:
        _check("alpha_s", self.alpha_s)
        _check("beta_s_per_byte", self.beta_s_per_byte)
        if not LEAST_WIRE_SHARE <= self.wire_share <= 1:
            raise ConfigError(
                f"wire_share is {self.wire_share}; it must be from 0.5 to 1", code="out-of-range"
            )

    def alone_s(self, nbytes: float) -> float:
        """Seconds that ``nbytes`` take with nothing else in flight."""
        return self.alpha_s + self.beta_s_per_byte * nbytes

    def wire_s(self, nbytes: float) -> float:
        """Seconds for which ``nbytes`` need the whole wire."""
        return self.wire_share * self.beta_s_per_byte * nbytes

    def pair_s(self, nbytes: float) -> float:
        """Seconds until two operations of ``nbytes`` each, started together, are complete."""
        return max(self.alone_s(nbytes), 2 * self.wire_s(nbytes))

    def scaled(self, *, alpha: float, beta: float) -> LinkModel:
        """This with both parts multiplied."""
        return replace(
            self, alpha_s=self.alpha_s * alpha, beta_s_per_byte=self.beta_s_per_byte * beta
        )


@dataclass(frozen=True, slots=True)
class Costs:
    """What a plan is judged by, at one world size.

    update_s, update_s_per_byte: of an optimizer step on the progress thread, per bucket and per
        byte of what a rank updates: its shard, or the whole bucket with ``gather="gradients"``.
    main_thread_s: of the main thread, which computes, per bucket and iteration.
    algorithm: of the reduce-scatters; it tells how both operations scale with the ranks.
    codec: what compression makes of large buckets; its seconds are taken to be the same at other
        world sizes.
    """

    world_size: int
    reduce_scatter: LinkModel
    all_gather: LinkModel
    update_s: float = 0.0
    update_s_per_byte: float = 0.0
    main_thread_s: float = 0.0
    algorithm: ReduceScatter = "ring"
    codec: CodecCost | None = None

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ConfigError(
                f"world size is {self.world_size}; it must be 1 or more", code="out-of-range"
            )
        _check("update_s", self.update_s)
        _check("update_s_per_byte", self.update_s_per_byte)
        _check("main_thread_s", self.main_thread_s)

    @property
    def num_rounds(self) -> int:
        """Messages of a collective that follow each other."""
        return ALGORITHM_COSTS[self.algorithm].num_rounds(self.world_size)

    def both_alone_s(self, nbytes: float) -> float:
        """Seconds of a reduce-scatter of ``nbytes`` and of its all-gather, each alone."""
        return self.reduce_scatter.alone_s(nbytes) + self.all_gather.alone_s(nbytes)

    @property
    def least_sent(self) -> tuple[float, float]:
        """The parts of a model's bytes that are reduced, and gathered, at least."""
        if self.codec is None:
            return 1.0, 1.0
        return min(1.0, self.codec.reduced), min(1.0, self.codec.gathered)

    def codec_of(self, numel: int) -> CodecCost | None:
        """What compresses a bucket of ``numel`` elements; None where nothing does."""
        return self.codec if self.codec is not None and self.codec.applies(numel) else None

    def with_typical_overheads(self) -> Costs:
        """With typical values for each bucket's fixed cost where none was measured."""
        return replace(
            self,
            update_s=self.update_s or _TYPICAL_UPDATE_S,
            main_thread_s=self.main_thread_s or _TYPICAL_MAIN_THREAD_S,
        )

    def sent_as(self, comm_dtype: CommDtype, specs: Iterable[ParamSpec]) -> Costs:
        """The same where the trained ones of ``specs`` are sent in ``comm_dtype``.

        Bytes still count as in memory, and take the time of the bytes sent, the average where
        tensors of several dtypes are mixed. Conversions are taken to cost nothing.

        Raises ConfigError if all are of half precision already.
        """
        if comm_dtype == "fp32":
            return self
        share = share_sent(comm_dtype, specs)
        return self.with_slopes(reduce_scatter=share, all_gather=share)

    def of_fp32_for(self, specs: Iterable[ParamSpec]) -> Costs:
        """These, measured with fp32 sent in half precision, for ``specs`` of any dtypes."""
        nbytes, sent = _bytes_sent(specs)
        factor = sent / nbytes * _FP32_BYTES / _HALF_BYTES if nbytes else 1.0
        return self.with_slopes(reduce_scatter=factor, all_gather=factor)

    def with_slopes(self, *, reduce_scatter: float, all_gather: float) -> Costs:
        """The same where a byte takes so many times as long as it does."""
        return replace(
            self,
            reduce_scatter=self.reduce_scatter.scaled(alpha=1, beta=reduce_scatter),
            all_gather=self.all_gather.scaled(alpha=1, beta=all_gather),
        )

    def at(self, world_size: int) -> Costs:
        """The same over ``world_size`` ranks, by the rounds and bytes of the algorithm.

        Raises ConfigError for costs of a world of one, in which nothing is sent.
        """
        if world_size < 1 or self.world_size == 1:
            raise ConfigError(
                f"costs at world size {self.world_size} cannot be converted to world size "
                f"{world_size}; measure on 2 ranks or more",
                code="costs-of-other-world",
            )
        cost = ALGORITHM_COSTS[self.algorithm]
        alpha = cost.num_rounds(world_size) / cost.num_rounds(self.world_size)
        beta = cost.sent_share(world_size) / cost.sent_share(self.world_size)
        return replace(
            self,
            world_size=world_size,
            reduce_scatter=self.reduce_scatter.scaled(alpha=alpha, beta=beta),
            all_gather=self.all_gather.scaled(alpha=alpha, beta=beta),
        )


def share_sent(comm_dtype: CommDtype, specs: Iterable[ParamSpec]) -> float:
    """The part of the trained ones' bytes that is sent in ``comm_dtype``.

    Raises ConfigError if all are of half precision already.
    """
    nbytes, sent = _bytes_sent(specs)
    if sent == nbytes:
        raise ConfigError(
            f"comm_dtype {comm_dtype!r} has no effect: no trained parameter is wider than "
            f"{_HALF_BYTES} bytes; leave it out",
            code="setting-without-effect",
        )
    return sent / nbytes


def _bytes_sent(specs: Iterable[ParamSpec]) -> tuple[int, int]:
    """Bytes of trained parameters in memory, and as sent in half precision."""
    trained = [spec for spec in specs if spec.trained]
    sent = sum(spec.numel * min(spec.itemsize, _HALF_BYTES) for spec in trained)
    return sum(spec.nbytes for spec in trained), sent


def ring_cost(alpha_s: float, beta_s_per_byte: float, world_size: int) -> LinkModel:
    """A ring over ``world_size`` ranks: ``(P - 1) * alpha + (P - 1) / P * n * beta``.

    alpha_s, beta_s_per_byte: of one message between neighbours.
    """
    if world_size < 1:
        raise ConfigError(f"world size is {world_size}; it must be 1 or more", code="out-of-range")
    ring = ALGORITHM_COSTS["ring"]
    return LinkModel(
        ring.num_rounds(world_size) * alpha_s, ring.sent_share(world_size) * beta_s_per_byte
    )


def one_after_another(first: LinkModel, second: LinkModel) -> LinkModel:
    """A collective that goes over both links in turn, such as within nodes and between them."""
    beta = first.beta_s_per_byte + second.beta_s_per_byte
    wire = sum(link.wire_share * link.beta_s_per_byte for link in (first, second))
    return LinkModel(first.alpha_s + second.alpha_s, beta, wire / beta if beta else 1.0)


@dataclass(frozen=True, slots=True)
class LinkFit:
    """A model and how far the samples are from it: root mean square, relative to each."""

    link: LinkModel
    relative_error: float


def fit_link(samples: Sequence[Sample], *, pairs: Sequence[Sample] = ()) -> LinkFit:
    """The alpha-beta model of operations measured alone.

    Least squares of relative errors, so that small messages count as much as large ones, with less
    weight for outliers (Huber); alpha and beta are 0 or more. ``pairs``: bytes of each of two
    operations in flight together, and the seconds until both were complete; the largest tells for
    how much of its time an operation needs the wire.

    Raises ConfigError for samples of fewer than two sizes, and for sizes and times that no link
    can have.
    """
    for nbytes, seconds in (*samples, *pairs):
        if not (0 < nbytes <= _MOST_BYTES and _LEAST_S <= seconds <= MOST_S):
            raise ConfigError(
                f"a sample of the link is {nbytes} bytes in {seconds} s; both must be above 0, and "
                f"a time from {_LEAST_S:g} to {MOST_S:g} s",
                code="samples-misfit",
            )
    if len({nbytes for nbytes, _ in samples}) < 2:
        raise ConfigError(
            f"{len(samples)} sample(s) of the link, of one size at most: latency and bandwidth "
            "need samples of two sizes or more",
            code="samples-misfit",
        )
    link, weights = LinkModel(0.0, 0.0), [1.0] * len(samples)
    for _ in range(_NUM_REWEIGHTINGS):
        link = _fit_weighted(samples, weights)
        errors = [abs(link.alone_s(nbytes) / seconds - 1) for nbytes, seconds in samples]
        scale = _HUBER * max(median(errors) / 0.6745, 1e-9)
        weights = [min(1.0, scale / error) if error else 1.0 for error in errors]
    link = _with_wire_share(link, pairs)
    mean_square = sum((link.alone_s(nbytes) / s - 1) ** 2 for nbytes, s in samples) / len(samples)
    return LinkFit(link, math.sqrt(mean_square))


def _fit_weighted(samples: Sequence[Sample], weights: Sequence[float]) -> LinkModel:
    """Alpha and beta of least weighted squares of relative errors."""
    one, size, square, time, product = 0.0, 0.0, 0.0, 0.0, 0.0
    for (nbytes, seconds), weight in zip(samples, weights, strict=True):
        relative = weight / seconds**2
        one += relative
        size += relative * nbytes
        square += relative * nbytes**2
        time += relative * seconds
        product += relative * nbytes * seconds
    spread = one * square - size**2
    beta = (one * product - size * time) / spread if spread > 0 else 0.0  # sizes as good as equal
    alpha = (time - beta * size) / one
    if alpha < 0:
        return LinkModel(0.0, product / square)
    if beta < 0:
        return LinkModel(time / one, 0.0)
    return LinkModel(alpha, beta)


def _with_wire_share(link: LinkModel, pairs: Sequence[Sample]) -> LinkModel:
    """``link`` with the rate of the largest pair, which is the wire's own where the two operations
    took longer together than one by itself.

    Where the fit is faster than that, small samples have misled it: beta is raised. Two that take
    no longer have waited for messages to arrive, and say nothing of how fast the wire is.
    """
    if not pairs:
        return link
    largest = max(nbytes for nbytes, _ in pairs)
    pair_s = median(seconds for nbytes, seconds in pairs if nbytes == largest)
    wire, beta = pair_s / (2 * largest), link.beta_s_per_byte
    if pair_s > _FULL_WIRE * link.alone_s(largest):
        beta = max(beta, wire)
    share = wire / beta if beta else 1.0
    return LinkModel(link.alpha_s, beta, min(1.0, max(LEAST_WIRE_SHARE, share)))


def _check(name: str, value: float) -> None:
    if not 0 <= value <= _MOST_COST:
        raise ConfigError(
            f"{name} is {value}; it must be from 0 to {_MOST_COST:g}", code="out-of-range"
        )
