"""Failures: what ranks that fail cost a long job, and how far apart checkpoints should be.

Failures are independent, and equally likely at all times. J. T. Daly, "A higher order estimate of
the optimum checkpoint interval for restart dumps", FGCS 22 (2006).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from dearmpi.errors import ConfigError


@dataclass(frozen=True, slots=True)
class FailureCost:
    """What failures and checkpoints take from a job, in seconds; ``lost`` is a share of its time.

    mtbf_s: mean time between failures of the whole job. interval_s: computation between two
    checkpoints. lost: checkpoints, work that is done again, and restarts.
    """

    world_size: int
    mtbf_s: float
    checkpoint_s: float
    restart_s: float
    interval_s: float
    lost: float

    def as_plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"failures": asdict(self)}

    def describe(self) -> list[str]:
        """Lines of text."""
        return [
            f"failures: {self.world_size} rank(s) have one every {self.mtbf_s / 3600:.3g} h",
            f"a checkpoint every {self.interval_s:.0f} s of computation loses least: "
            f"{self.lost:.2%} of the job, with checkpoints of {self.checkpoint_s:g} s and restarts "
            f"of {self.restart_s:g} s",
        ]


def cost_of_failures(
    world_size: int, *, rank_mtbf_s: float, checkpoint_s: float, restart_s: float
) -> FailureCost:
    """With checkpoints as far apart as loses least.

    rank_mtbf_s: mean seconds between failures of one rank. Raises ConfigError for times out of
    range, and for a job that would hardly ever reach its next checkpoint.
    """
    for name, value, least in (
        ("the mean time between failures", rank_mtbf_s, 0.0),
        ("the time of a checkpoint", checkpoint_s, 0.0),
        ("the time of a restart", restart_s, -1.0),
    ):
        if not least < value < math.inf or value < 0:
            wanted = "positive" if least == 0.0 else "0 or more"
            raise ConfigError(f"{name} is {value:g} s; it must be {wanted}", code="out-of-range")
    mtbf_s = rank_mtbf_s / world_size
    if checkpoint_s + restart_s >= mtbf_s:
        raise ConfigError(
            f"{world_size} ranks fail every {mtbf_s:.3g} s on average, but a checkpoint and a "
            f"restart take {checkpoint_s + restart_s:g} s: such a job stands still; use fewer "
            "ranks, or quicker checkpoints",
            code="out-of-range",
        )
    interval_s = best_interval(checkpoint_s, mtbf_s)
    lost = share_lost(interval_s, mtbf_s=mtbf_s, checkpoint_s=checkpoint_s, restart_s=restart_s)
    return FailureCost(world_size, mtbf_s, checkpoint_s, restart_s, interval_s, lost)


def best_interval(checkpoint_s: float, mtbf_s: float) -> float:
    """Seconds of computation between checkpoints that lose least: Daly's equation (37)."""
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = checkpoint_s / (2 * mtbf_s)
    first = math.sqrt(2 * checkpoint_s * mtbf_s)
    return first * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_s


def share_lost(interval_s: float, *, mtbf_s: float, checkpoint_s: float, restart_s: float) -> float:
    """Of the job's time, what is no new computation. Failures strike checkpoints and restarts too.

    M, C and R are the other three. Computation and its checkpoint take, on average,
    M exp(R/M) (exp((interval + C)/M) - 1): Daly's equation (20).
    """
    segment_s = (
        mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + checkpoint_s) / mtbf_s)
    )
    return 1 - interval_s / segment_s
