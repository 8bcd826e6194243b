"""Arrivals: a bucket is full with its last gradient, and what got none is left out or zero."""

from __future__ import annotations

from dearmpi.engine.bucket.arrivals import Arrivals


def arrivals_of(*slots: int) -> Arrivals:
    """At the end of a backprop that had gradients for ``slots`` of three parameters."""
    arrivals = Arrivals(["a", "b", "c"])
    take_step(arrivals, *slots)
    return arrivals


def take_step(arrivals: Arrivals, *slots: int) -> None:
    arrivals.forget()
    arrivals.release()
    arrivals.expect(range(3))
    for slot in slots:
        arrivals.arrive(slot)
    arrivals.close()


def test_the_last_gradient_that_is_expected_fills_a_bucket() -> None:
    arrivals = Arrivals(["a", "b", "c"])
    arrivals.expect([0, 2])
    assert arrivals.frozen == {1}
    assert [arrivals.arrive(2), arrivals.arrive(0)] == [False, True]
    assert arrivals.missing == {1}
    arrivals.reopen()
    assert arrivals.awaited == {0, 2} and not arrivals.arrived


def test_in_a_further_backprop_nothing_is_missing_that_had_a_gradient_before() -> None:
    arrivals = arrivals_of(0)
    assert arrivals.missing == {1, 2}
    arrivals.reopen()
    arrivals.arrive(1)
    arrivals.close()
    assert arrivals.missing == {2} and arrivals.stood_in == {0, 1}


def test_a_zero_counts_as_a_gradient_of_what_has_had_one() -> None:
    arrivals = arrivals_of(0, 1)
    arrivals.release()
    arrivals.zero(set_to_none=False)
    take_step(arrivals, 2)
    assert arrivals.missing == frozenset()
    arrivals.zero(set_to_none=True)
    take_step(arrivals, 2)
    assert arrivals.missing == {0, 1}


def test_another_bucket_goes_on_with_what_parameters_have_had() -> None:
    before = arrivals_of(0, 1)
    before.release()
    before.zero(set_to_none=False)
    assert before.history() == {"a": True, "b": True}
    after = Arrivals(["c", "b"])
    after.recall(before.history())
    after.expect(range(2))
    after.close()
    assert after.missing == {0}
