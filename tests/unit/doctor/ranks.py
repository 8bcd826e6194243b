"""Ranks for checks to judge."""

from __future__ import annotations

from typing import Any

from dearmpi.doctor.finding import RankFacts
from dearmpi.train.ranks.device import VisibleGpus


def rank(number: int = 0, **changes: Any) -> RankFacts:
    """A rank on host n0 with two cores and nothing wrong about it."""
    facts: dict[str, Any] = {
        "host": "n0",
        "system": "Linux-6.1",
        "cores": (0, 1),
        "quota": None,
        "threads": 1,
        "threads_reason": "cores: 2, ranks on this host: 2",
        "threads_asked": False,
        "script_threads": 1,
        "versions": {"python": "3.12.1", "torch": "2.13.0"},
        "devices": (),
        "gpus": VisibleGpus(0, reason="CUDA_VISIBLE_DEVICES is not set", cure="see nvidia-smi"),
        "infiniband": (),
        "start_method": "fork",
        "environment": {},
    }
    return RankFacts(rank=number, **(facts | changes))
