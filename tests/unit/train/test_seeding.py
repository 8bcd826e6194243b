"""Seeding: the same parts give the same numbers, and other parts others."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from dearmpi.train.seeding import seed_all


def drawn(*parts: int) -> tuple[float, float, float]:
    seed_all(*parts)
    return float(torch.rand(())), float(np.random.rand()), random.random()


def test_the_same_parts_give_the_same_numbers() -> None:
    assert drawn(5, 1) == drawn(5, 1)


@pytest.mark.parametrize("other", [(5, 0), (5, 0, 0), (0, 5), (6,)])
def test_other_parts_give_other_numbers(other: tuple[int, ...]) -> None:
    """Else the noise of rank 0 would repeat the numbers that the model began with."""
    assert all(one != two for one, two in zip(drawn(5), drawn(*other), strict=True))
