"""Grad tracker: a bucket is full with its last gradient, and what got none is left out or zero."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dearmpi.engine.bucket.grad_tracker import TRANSITIONS, GradState, GradTracker


def tracker_of(*slots: int) -> GradTracker:
    """At the end of a backprop that had gradients for ``slots`` of three parameters."""
    tracker = GradTracker(["a", "b", "c"])
    take_step(tracker, *slots)
    return tracker


def take_step(tracker: GradTracker, *slots: int) -> None:
    tracker.reset()
    tracker.release()
    tracker.expect(range(3))
    for slot in slots:
        tracker.arrive(slot)
    tracker.close()


def states_of(tracker: GradTracker) -> str:
    """In letters: F, P, Q, N, A (again), R, E, and - for absent or idle."""
    return "".join(
        "-" if s in (GradState.ABSENT, GradState.IDLE) else s.name[0] for s in tracker.states
    )


def test_the_last_gradient_that_is_expected_fills_a_bucket() -> None:
    tracker = GradTracker(["a", "b", "c"])
    tracker.expect([0, 2])
    assert states_of(tracker) == "PFP" and tracker.frozen == {1}
    assert [tracker.arrive(2), tracker.arrive(0)] == [False, True]
    assert tracker.missing == {1}
    tracker.reopen()
    assert states_of(tracker) == "AFA"


def test_in_a_further_backprop_nothing_is_missing_that_had_a_gradient_before() -> None:
    tracker = tracker_of(0)
    assert tracker.missing == {1, 2}
    tracker.reopen()
    assert states_of(tracker) == "APP"
    tracker.arrive(1)
    tracker.close()
    assert states_of(tracker) == "ER-"
    assert tracker.missing == {2} and tracker.covered == {0, 1}


def test_a_zero_counts_as_a_gradient_of_what_has_had_one() -> None:
    tracker = tracker_of(0, 1)
    tracker.release()
    tracker.zero(set_to_none=False)
    take_step(tracker, 2)
    assert tracker.missing == frozenset()
    tracker.zero(set_to_none=True)
    take_step(tracker, 2)
    assert tracker.missing == {0, 1}


def test_another_bucket_goes_on_with_what_parameters_have_had() -> None:
    before = tracker_of(0, 1)
    before.release()
    before.zero(set_to_none=False)
    assert before.history() == {"a": True, "b": True}
    after = GradTracker(["c", "b"])
    after.recall(before.history())
    after.expect(range(2))
    after.close()
    assert after.missing == {0}


def test_gradients_come_quietly_as_long_as_a_loud_one_is_pending() -> None:
    """Else no hook would look at those that are noted."""
    tracker = GradTracker(["a", "b", "c"], quiet=[1, 2])
    tracker.expect(range(3), quietly=True)
    assert states_of(tracker) == "PQQ"
    note(tracker, 2)
    assert not tracker.arrive(0)
    assert states_of(tracker) == "RPN"
    assert not tracker.arrive_noted(tracker.take_noted())
    assert tracker.arrive(1)
    tracker.reset()
    tracker.expect([1, 2], quietly=True)
    assert states_of(tracker) == "FPP"


def note(tracker: GradTracker, slot: int) -> None:
    """As a hook does."""
    if tracker.states[slot] is GradState.QUIET:
        tracker.states[slot] = GradState.NOTED
        tracker.noted.append(slot)


@given(
    st.sets(st.integers(0, 4)),
    st.sets(st.integers(0, 4), min_size=1),
    st.lists(st.sampled_from(["note", "arrive", "make loud", "close", "reopen"])),
    st.data(),
)
def test_states_change_as_the_table_says(
    quiet: set[int], expected: set[int], moments: list[str], data: st.DataObject
) -> None:
    tracker = GradTracker("abcde", quiet=quiet)
    seen = [list(tracker.states)]

    def look() -> None:
        for old, new in zip(seen[-1], tracker.states, strict=True):
            assert old is new or new in TRANSITIONS[old]
        seen.append(list(tracker.states))

    def collect() -> None:
        slots = tracker.take_noted()
        look()
        tracker.arrive_noted(slots)
        look()

    tracker.expect(expected, quietly=True)
    look()
    for moment in moments:
        slot = data.draw(st.sampled_from(sorted(expected)))
        if moment == "note":
            note(tracker, slot)
        elif moment == "arrive":
            collect()
            tracker.arrive(slot)
        elif moment == "make loud":
            tracker.make_loud()
        else:
            collect()
            tracker.close()
            had = {s for s in expected if GradState.READY in (row[s] for row in seen)}
            assert tracker.missing == set(range(5)) - had
        look()
        if moment == "reopen":
            tracker.reopen()
            look()
    collect()
    tracker.close()
    look()
    tracker.reset()
    look()
    assert set(tracker.states) == {GradState.IDLE}
