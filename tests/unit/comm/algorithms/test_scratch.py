"""Scratch memory: as much as operations use at once, for any lengths of buckets."""

from __future__ import annotations

import random
import weakref

import numpy as np
import pytest

from dearmpi.comm.algorithms.scratch import Scratch
from dearmpi.comm.messages.values import HostBuffer

LENGTHS = [3, 70, 71, 72, 100, 5, 99, 98, 1, 50, 100, 64]


class Watched(HostBuffer):
    """Makes buffers that it knows of as long as they live."""

    living: weakref.WeakSet[Watched]

    def new_empty(self, size: int) -> Watched:
        made = Watched(np.empty(size, self.array.dtype))
        made.living = self.living
        self.living.add(made)
        return made


@pytest.fixture
def like() -> Watched:
    buffer = Watched(np.empty(0))
    buffer.living = weakref.WeakSet()
    return buffer


@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_scratch_is_no_more_than_is_in_use_at_once(like: Watched, at_once: int) -> None:
    """And so does not grow with the model, whose buckets nearly all differ in length."""
    scratch, chance = Scratch(), random.Random(at_once)
    held: list[Watched] = []
    for _ in range(30):
        for length in LENGTHS:
            if len(held) == at_once:
                scratch.give_back(held.pop(chance.randrange(at_once)))
            held.append(scratch.take(like, length))
            assert held[-1].numel() >= length
            assert len({id(buffer) for buffer in held}) == len(held)
            assert len(like.living) <= at_once
            assert sum(buffer.numel() for buffer in like.living) <= at_once * max(LENGTHS)


def test_what_has_been_taken_is_taken_again(like: Watched) -> None:
    """Fresh pages cost more than what is done with them."""
    scratch = Scratch()
    for length in LENGTHS:
        scratch.give_back(scratch.take(like, length))
    (kept,) = like.living
    for length in LENGTHS:
        taken = scratch.take(like, length)
        assert taken is kept
        scratch.give_back(taken)


def test_a_buffer_serves_its_own_dtype_only(like: Watched) -> None:
    scratch, narrow = Scratch(), HostBuffer(np.empty(0, np.float32))
    scratch.give_back(scratch.take(like, 10))
    assert scratch.take(narrow, 5).dtype == np.float32
    assert scratch.take(like, 5).dtype == np.float64
