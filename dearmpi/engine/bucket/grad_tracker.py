"""Grad tracker: which gradients of a bucket have come, and what the others count as."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum, auto


class GradState(IntEnum):
    """What is known of one parameter's gradient in this iteration; an int, to be compared fast."""

    IDLE = auto()  # no iteration is under way
    FROZEN = auto()  # the parameter did not require grad when the iteration started
    PENDING = auto()  # the backprop that fills the bucket has not brought it yet
    QUIET = auto()  # the same, and it may come with no more than a note
    NOTED = auto()  # it has come with a note, and still lies in ``param.grad``
    AGAIN = auto()  # a further backprop has not brought it yet; an earlier one has, and is reduced
    READY = auto()  # it lies in the buffer, or is held on its way there
    EARLIER = auto()  # the further backprop has ended without it; the earlier one counts
    ABSENT = auto()  # backprop has ended, and this rank has had none in this iteration


TRANSITIONS: Mapping[GradState, frozenset[GradState]] = {
    GradState.IDLE: frozenset({GradState.FROZEN, GradState.PENDING, GradState.QUIET}),
    GradState.FROZEN: frozenset({GradState.IDLE}),
    GradState.PENDING: frozenset({GradState.READY, GradState.ABSENT}),
    GradState.QUIET: frozenset(
        {GradState.NOTED, GradState.PENDING, GradState.READY, GradState.ABSENT}
    ),
    GradState.NOTED: frozenset({GradState.READY, GradState.ABSENT}),
    GradState.AGAIN: frozenset({GradState.READY, GradState.EARLIER}),
    GradState.READY: frozenset({GradState.AGAIN, GradState.ABSENT, GradState.IDLE}),
    GradState.EARLIER: frozenset(
        {GradState.READY, GradState.AGAIN, GradState.ABSENT, GradState.IDLE}
    ),
    GradState.ABSENT: frozenset({GradState.READY, GradState.PENDING, GradState.IDLE}),
}
"""From each state to which others one moment may lead."""

PENDING_STATES = frozenset({GradState.PENDING, GradState.QUIET, GradState.NOTED, GradState.AGAIN})
"""The gradient has not been taken in the backprop that fills the bucket."""

_HAD = frozenset({GradState.AGAIN, GradState.READY, GradState.EARLIER})


class GradTracker:
    """One ``GradState`` for each slot; a slot is the number of a parameter in its bucket.

    states: by slot. noted: the slots that are NOTED, in the order in which they came. Both stay the
        same lists, for hooks, which turn QUIET into NOTED.
    covered: slots whose ``param.grad`` is a placeholder, until ``release``. It stays the same set,
        and the main thread alone writes it.
    expected: slots that required grad when the iteration started.
    missing: slots without a gradient on this rank in this iteration, nor a zero that counts as one,
        when a backprop last filled the bucket.

    One thread at a time writes the states, as with all of a bucket.
    """

    def __init__(self, names: Sequence[str], *, quiet: Iterable[int] = ()) -> None:
        """``names``: the parameters', by slot. ``quiet``: the slots that may be QUIET."""
        self._names = tuple(names)
        self._may_be_quiet = frozenset(quiet)
        self.states = [GradState.IDLE] * len(self._names)
        self.noted: list[int] = []
        self.covered: set[int] = set()
        self.expected: frozenset[int] = frozenset()
        self.missing: frozenset[int] = frozenset()
        self._num_pending = 0
        self._num_loud = 0  # pending, and never quiet
        self._has_quiet = False
        # Of the last iteration: they seldom change.
        self._began: tuple[frozenset[int], bool] | None = None
        self._first_states: list[GradState] = []
        # Had a gradient in some step, since gradients were last set to None.
        self._had: set[int] = set()
        # Had one when gradients were last set to zero, which they have since.
        self._zeroed: frozenset[int] = frozenset()

    @property
    def frozen(self) -> frozenset[int]:
        """Slots of which no gradient is expected in this iteration."""
        return frozenset(range(len(self._names))) - self.expected

    def expect(self, slots: Iterable[int], *, quietly: bool = False) -> None:
        """An iteration starts, in which these require grad; ``quietly``: some may be QUIET, unless
        all would be.
        """
        self.expected = frozenset(slots)
        quiet = self.expected & self._may_be_quiet
        self._num_pending = len(self.expected)
        self._num_loud = self._num_pending - len(quiet)
        self._has_quiet = quietly and bool(quiet) and self._num_loud > 0
        began = (self.expected, self._has_quiet)
        if began != self._began:
            self._began = began
            self._first_states = [self._first_state(slot) for slot in range(len(self.states))]
        self.states[:] = self._first_states

    def _first_state(self, slot: int) -> GradState:
        if slot not in self.expected:
            return GradState.FROZEN
        is_quiet = self._has_quiet and slot in self._may_be_quiet
        return GradState.QUIET if is_quiet else GradState.PENDING

    def make_loud(self) -> None:
        """No gradient may come quietly any more in this iteration."""
        self._has_quiet = False
        for slot in self._may_be_quiet:
            if self.states[slot] is GradState.QUIET:
                self.states[slot] = GradState.PENDING

    def take_noted(self) -> list[int]:
        """The slots that are noted. They are NOTED until they arrive, or the backprop ends."""
        slots = self.noted.copy()
        self.noted.clear()
        return slots

    def arrive(self, slot: int) -> bool:
        """A placeholder has taken the place of a gradient; True if none is pending any more."""
        if self.states[slot] in PENDING_STATES:
            self._num_pending -= 1
            self._num_loud -= slot not in self._may_be_quiet
        self.states[slot] = GradState.READY
        self.covered.add(slot)
        return self._is_full()

    def arrive_noted(self, slots: Sequence[int]) -> bool:
        """As ``arrive``, for slots of ``take_noted``."""
        states, ready = self.states, GradState.READY
        for slot in slots:
            states[slot] = ready
        self._num_pending -= len(slots)
        self.covered.update(slots)
        return self._is_full()

    def _is_full(self) -> bool:
        if not self._num_pending:
            self._find_missing()
            return True
        if self._has_quiet and not self._num_loud:  # else no hook would look at what is noted
            self.make_loud()
        return False

    def close(self) -> None:
        """No more gradients come in this backprop."""
        states = self.states
        for slot, state in enumerate(states):
            if state in PENDING_STATES:
                is_earlier = state is GradState.AGAIN
                states[slot] = GradState.EARLIER if is_earlier else GradState.ABSENT
        self._num_pending, self._has_quiet = 0, False
        self._find_missing()

    def reopen(self) -> None:
        """What has arrived is reduced, and a further backprop of the iteration adds to it."""
        states = self.states
        for slot in self.expected:
            states[slot] = GradState.AGAIN if states[slot] in _HAD else GradState.PENDING
        self._num_pending, self._has_quiet = len(self.expected), False

    def release(self) -> None:
        """The placeholders are gone."""
        self._had |= self.covered
        self.covered.clear()

    def cover(self, slot: int) -> None:
        """A placeholder stands for a gradient that other ranks have."""
        self.covered.add(slot)
        self.missing -= {slot}

    def withdraw(self, slot: int, *, is_missing: bool) -> None:
        """The script has put something else in the place of a placeholder, ``is_missing``: None."""
        self.covered.discard(slot)
        if is_missing:
            self.states[slot] = GradState.ABSENT
            self.missing |= {slot}
        else:
            self._had.add(slot)

    def reset(self) -> None:
        """Back to the start of an iteration."""
        self.states[:] = [GradState.IDLE] * len(self.states)
        self.missing = frozenset()

    def zero(self, *, set_to_none: bool) -> None:
        """Note what a parameter without gradient has from now on: none at all, or zero.

        torch leaves out the first in its step, but not the second.
        """
        if set_to_none:
            self._had.clear()
        self._zeroed = frozenset(self._had)

    def forget(self, slots: Iterable[int]) -> None:
        """These have no gradient from now on, not even zero."""
        self._had.difference_update(slots)
        self._zeroed &= self._had

    def history(self) -> dict[str, bool]:
        """Names of parameters that have had a gradient in any step, and whether it is zero now."""
        return {self._names[slot]: slot in self._zeroed for slot in self._had}

    def recall(self, history: Mapping[str, bool]) -> None:
        """Go on with the ``history`` that parameters have had in buckets of before."""
        self._had |= {slot for slot, name in enumerate(self._names) if name in history}
        self._zeroed |= {slot for slot in self._had if history.get(self._names[slot])}

    def _find_missing(self) -> None:
        """For all slots at once: hooks run once for each."""
        states = self.states
        if states.count(GradState.READY) == len(states):
            self.missing = frozenset()
            return
        none = {slot for slot, state in enumerate(states) if state not in _HAD}
        self.missing = frozenset(none - self._zeroed)


def quiet_slots(nbytes: Sequence[int], *, copied_bytes: int) -> frozenset[int]:
    """Slots that may be quiet: of neighbours of ``copied_bytes``, which are copied together, all
    but the lowest, which backprop finishes last; ``nbytes``: by slot.
    """
    quiet, together = set(), 0
    for slot in range(len(nbytes) - 1, 0, -1):
        together += nbytes[slot]
        if together < copied_bytes:
            quiet.add(slot)
        else:
            together = 0
    return frozenset(quiet)
