"""What operations took in training says how fast the wire is; how ranks wait for each other not."""

from __future__ import annotations

import pytest

from dearmpi.tune.wire_pace import Crossed, wire_pace


def in_turn(begin_s: float, seconds: float, count: int, *, wire_s: float) -> list[Crossed]:
    """Operations with two in flight, of which one ends every ``seconds``."""
    return [
        Crossed(begin_s + max(0, number - 1) * seconds, begin_s + (number + 1) * seconds, wire_s)
        for number in range(count)
    ]


def test_a_wire_is_as_fast_as_a_stretch_of_training_has_found_it() -> None:
    """But for half of an operation, whose share before the first moment that counts is unknown."""
    slow, fast = in_turn(0.0, 0.1, 42, wire_s=0.1), in_turn(9.0, 0.08, 42, wire_s=0.1)
    assert wire_pace(slow) == 1.0
    assert wire_pace([*fast, *slow]) == pytest.approx(0.8 * 40 / 39.5)


def test_operations_that_other_ranks_began_earlier_make_no_wire_faster() -> None:
    """The first two of each stretch are over as soon as this rank joins them."""
    late = [Crossed(0.0, 0.001, 0.1), Crossed(0.0, 0.002, 0.1)]
    rest = in_turn(0.002, 0.1, 8, wire_s=0.1)
    assert wire_pace([*late, *rest]) == pytest.approx(1.0, abs=0.01)


def test_waiting_for_another_rank_makes_no_wire_slower() -> None:
    assert wire_pace(in_turn(0.0, 0.3, 8, wire_s=0.1)) == 1.0


def test_too_little_says_nothing() -> None:
    assert wire_pace([]) == 1.0
    assert wire_pace(in_turn(0.0, 0.001, 6, wire_s=0.01)) == 1.0
    apart = [Crossed(float(second), second + 0.1, 0.5) for second in range(8)]
    assert wire_pace(apart) == 1.0
