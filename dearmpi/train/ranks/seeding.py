"""Seeding: random numbers that follow from the run's seed, in all libraries that draw them."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_all(*parts: int) -> None:
    """Seed torch, numpy and ``random`` from ``parts``: the same parts, the same numbers, and other
    parts others.
    """
    # numpy fills up with zeros: (5,) and (5, 0, 0) would be one.
    words = np.random.SeedSequence((len(parts), *parts)).generate_state(3, np.uint32)
    torch.manual_seed(int(words[0]))
    np.random.seed(int(words[1]))
    random.seed(int(words[2]))
