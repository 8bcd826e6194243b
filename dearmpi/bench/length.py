"""Length: how long a contest measures, and for how long all methods warm up before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dearmpi.bench.gloo import PATIENCE_S
from dearmpi.bench.method import Method
from dearmpi.bench.result import Result
from dearmpi.engine.setup.self_planning import LEAST_STEPS
from dearmpi.errors import ConfigError

# New TCP connections carry up to a fifth less for a second or two. Those of MPI are as old as the
# job, those of gloo as the block, in which only a part of the time is communication.
LINK_WARM_UP_S = 2.0
BLOCK_WARM_UP_S = 4.0
_MOST_WARMING = 1000  # iterations; with ten times as many, sums in fp32 could no longer be judged


@dataclass(frozen=True, slots=True)
class Length:
    """How long to measure: ``num_rounds`` blocks of ``num_batches`` iterations for each method.

    num_warmup: iterations before each block that do not count, after those of ``least_tuning`` and
        ``least_warming``.
    warm_up_s: for how long connections between hosts are used before a block, at least.
    patience_s: how long a rank waits for others inside a peer before it gives the peer up.
    """

    num_warmup: int = 3
    num_batches: int = 5
    num_rounds: int = 3
    warm_up_s: float = BLOCK_WARM_UP_S
    patience_s: float = PATIENCE_S

    def __post_init__(self) -> None:
        if self.num_warmup < 1:
            raise ConfigError(
                f"{self.num_warmup} warm-up iterations; at least 1 is needed, since an iteration "
                "begins with the gathers of the one before",
                code="out-of-range",
            )
        if self.num_batches < 1 or self.num_rounds < 1:
            raise ConfigError(
                f"{self.num_rounds} rounds of {self.num_batches} iterations; both must be at "
                "least 1",
                code="out-of-range",
            )


def least_tuning(methods: Sequence[Method]) -> int:
    """Iterations before the warm-up that every method has at least.

    Those in which one tunes itself warm it up as well, so the others get as many as a plan takes.
    """
    return LEAST_STEPS if any(method.tunes_itself for method in methods) else 0


def least_warming(result: Result, length: Length) -> int:
    """Iterations before the warm-up that make every method's connections as fast as they get.

    By the least that an iteration takes, from what is known of computation and communication alone;
    a thousand at most. 0 where all ranks are on one host, whose processes know no such beginning.
    """
    bounds = result.bounds
    if bounds is None or result.hosts == 1:
        return 0
    num = min(_MOST_WARMING, math.ceil(length.warm_up_s / bounds.absolute_s))
    return max(0, num - length.num_warmup)
