"""What a benchmark found, as plain data: for the table, the file and the picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from dearmpi.config import CommDtype
from dearmpi.report.draw.units import count_text


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """Communication alone: seconds of all reduce-scatters, and of all all-gathers."""

    reduce_scatter_s: float
    all_gather_s: float

    @property
    def total_s(self) -> float:
        return self.reduce_scatter_s + self.all_gather_s


@dataclass(frozen=True, slots=True)
class MeasuredIteration:
    """Seconds of one iteration, the mean over ranks, and of its parts on the main thread."""

    feed_forward_s: float
    backprop_s: float
    step_s: float

    @property
    def total_s(self) -> float:
        return self.feed_forward_s + self.backprop_s + self.step_s


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive iterations of one method, after its warm-up.

    cpu_s: processor seconds of an iteration, the mean over ranks.
    peak_bytes: most memory beyond what the process had before the model was built, of the rank
        with most; None where the system does not tell.
    note: what the method says of itself.
    """

    iterations: tuple[MeasuredIteration, ...]
    cpu_s: float
    peak_bytes: int | None
    note: str = ""

    @property
    def mean_s(self) -> float:
        return statistics.fmean(one.total_s for one in self.iterations)


@dataclass(slots=True)
class Row:
    """A method, with a block for each round; ``error`` says in a line why it has no more.

    comm_dtype: in what it sent fp32, as far as it says.
    """

    label: str
    blocks: list[Block] = field(default_factory=list)
    error: str = ""
    comm_dtype: CommDtype = "fp32"

    @property
    def name(self) -> str:
        """The label, and how much there is where the method failed later."""
        if not self.error or not self.blocks:
            return self.label
        return f"{self.label} ({count_text(len(self.blocks), 'round')}, then failed)"

    def iterations(self) -> list[MeasuredIteration]:
        return [one for block in self.blocks for one in block.iterations]

    def totals(self) -> list[float]:
        """Seconds of each iteration of all rounds."""
        return [one.total_s for one in self.iterations()]

    @property
    def median_s(self) -> float:
        return statistics.median(self.totals())

    @property
    def cpu_s(self) -> float:
        """Processor seconds of an iteration."""
        return statistics.median(block.cpu_s for block in self.blocks)

    @property
    def peak_bytes(self) -> int | None:
        """Most memory of any round."""
        return max((b.peak_bytes for b in self.blocks if b.peak_bytes is not None), default=None)


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third; of one value, twice that."""
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


@dataclass(frozen=True, slots=True)
class Bounds:
    """What no method can beat, from computation alone and communication alone, unless it sends
    fewer bytes.

    update_s: the optimizer's own time on the whole model; not part of either bound.
    num_buckets: in how many pieces communication was measured; payload_bytes: their size.
    """

    feed_forward_s: float
    backprop_s: float
    update_s: float
    reduce_scatter_s: float
    all_gather_s: float
    num_buckets: int
    payload_bytes: int

    @property
    def compute_s(self) -> float:
        return self.feed_forward_s + self.backprop_s

    @property
    def communication_s(self) -> float:
        return self.reduce_scatter_s + self.all_gather_s

    @property
    def dear_s(self) -> float:
        """Reduce-scatters behind backprop only, all-gathers behind feed-forward only."""
        return max(self.backprop_s, self.reduce_scatter_s) + max(
            self.feed_forward_s, self.all_gather_s
        )

    @property
    def absolute_s(self) -> float:
        """All communication behind all computation."""
        return max(self.compute_s, self.communication_s)


@dataclass(slots=True)
class Result:
    """A whole benchmark. batch_size: per rank. alone: plain torch without communication.

    comm_dtype: in what fp32 was sent, in ``link`` and by methods that do not say so themselves.
    torch_threads: with how many rank 0 computed; None where that is not known.
    """

    subject: str
    unit: str
    batch_size: int
    units_per_sample: int
    world_size: int
    hosts: int
    alone: Row
    rows: list[Row]
    link: list[LinkTimes]
    num_buckets: int
    payload_bytes: int
    comm_dtype: CommDtype = "fp32"
    torch_threads: int | None = None

    @property
    def bounds(self) -> Bounds | None:
        """None as long as computation alone or communication alone has not been measured."""
        iterations = self.alone.iterations()
        if not iterations or not self.link:
            return None
        return Bounds(
            feed_forward_s=statistics.median(one.feed_forward_s for one in iterations),
            backprop_s=statistics.median(one.backprop_s for one in iterations),
            update_s=statistics.median(one.step_s for one in iterations),
            reduce_scatter_s=statistics.median(one.reduce_scatter_s for one in self.link),
            all_gather_s=statistics.median(one.all_gather_s for one in self.link),
            num_buckets=self.num_buckets,
            payload_bytes=self.payload_bytes,
        )

    def problems(self) -> list[str]:
        """Why rows have no more blocks, a line for each; none where all were measured."""
        return [f"{row.label}: {row.error}" for row in (self.alone, *self.rows) if row.error]

    def rows_that_send_less(self) -> list[Row]:
        """Those measured that send half of what the bounds are of, and so may be below them."""
        if self.comm_dtype != "fp32":
            return []
        return [row for row in self.rows if row.blocks and row.comm_dtype != "fp32"]

    def rate(self, seconds: float) -> float:
        """Units per second and rank of iterations that take ``seconds``."""
        return self.batch_size * self.units_per_sample / seconds
