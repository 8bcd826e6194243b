"""Arrivals: which gradients of a bucket have come, and what the others count as."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


class Arrivals:
    """Sets of slots; a slot is the number of a parameter in its bucket.

    expected: it required grad when the iteration started.
    awaited: of those, its gradient has not come yet in the backprop that fills the bucket.
    quiet: of those, its gradient may come with no more than a note in ``came``: others have to
        come as well, of which at least one is not quiet.
    came: noted so, in this order, and not looked at yet.
    arrived: a gradient of it is in the buffer, or on its way there, since the iteration started or
        was reopened.
    missing: when a backprop last filled the bucket, it had had no gradient on this rank in this
        iteration, nor a zero that counts as one.
    stood_in: a stand-in has taken the place of its ``param.grad``, until ``release``.

    One thread at a time writes, as with all of a bucket. ``quiet``, ``came`` and ``stood_in`` stay
    the same objects, for those who look whenever a gradient comes.
    """

    def __init__(self, names: Sequence[str], *, quiet: Iterable[int] = ()) -> None:
        """``names``: the parameters', by slot. ``quiet``: the slots that may be."""
        self._names = tuple(names)
        self._may_be_quiet = frozenset(quiet)
        self._loud: set[int] = set()  # awaited, and not to be quiet in this iteration
        self.quiet: set[int] = set()
        self.came: list[int] = []
        self._slots = frozenset(range(len(self._names)))
        self.expected: frozenset[int] = frozenset()
        self.awaited: set[int] = set()
        self.arrived: set[int] = set()
        self.missing: frozenset[int] = frozenset()
        self.stood_in: set[int] = set()
        # All that are not missing: with a gradient of some backprop of this iteration, or zeroed.
        self._touched: set[int] = set()
        # Had a gradient in some step, since gradients were last set to None.
        self._ever: set[int] = set()
        # Those that were among them when gradients were last set to zero, which they now have.
        self._zeroed: frozenset[int] = frozenset()

    @property
    def frozen(self) -> frozenset[int]:
        """Slots of which no gradient is expected in this iteration."""
        return self._slots - self.expected

    def expect(self, slots: Iterable[int], *, quietly: bool = False) -> None:
        """An iteration starts, in which these require grad; ``quietly``: some may be quiet."""
        self.expected = frozenset(slots)
        self.awaited = set(self.expected)
        self._loud = self.awaited - self._may_be_quiet
        self.quiet.clear()
        if quietly and self._loud:
            self.quiet |= self.awaited - self._loud

    def arrive(self, *slots: int) -> bool:
        """Stand-ins have taken the place of gradients; True if none is awaited any more."""
        self.arrived.update(slots)
        self.stood_in.update(slots)
        self.awaited.difference_update(slots)
        self._loud.difference_update(slots)
        self.quiet.intersection_update(self.awaited if self._loud else ())
        if self.awaited:
            return False
        self.close()
        return True

    def close(self) -> None:
        """No more come in this backprop. For all at once: hooks run once for each."""
        self.awaited.clear()
        self.quiet.clear()
        self._touched |= self.arrived | self._zeroed
        self.missing = self._slots - self._touched

    def reopen(self) -> None:
        """What has arrived is reduced, and a further backprop of the iteration adds to it."""
        self.arrived.clear()
        self.awaited = set(self.expected)
        self.quiet.clear()

    def release(self) -> None:
        """The stand-ins are gone."""
        self._ever |= self.stood_in
        self.stood_in.clear()

    def forget(self) -> None:
        """Back to the start of an iteration."""
        self.arrived.clear()
        self.awaited.clear()
        self._touched.clear()
        self.missing = frozenset()

    def zero(self, *, set_to_none: bool) -> None:
        """Note what a parameter without gradient has from now on: none at all, or zero.

        torch leaves out the first in its step, but not the second.
        """
        if set_to_none:
            self._ever.clear()
        self._zeroed = frozenset(self._ever)

    def history(self) -> dict[str, bool]:
        """Names of parameters that have had a gradient in any step, and whether it is zero now."""
        return {self._names[slot]: slot in self._zeroed for slot in self._ever}

    def recall(self, history: Mapping[str, bool]) -> None:
        """Go on with the ``history`` that parameters have had in buckets of before."""
        self._ever |= {slot for slot, name in enumerate(self._names) if name in history}
        self._zeroed |= {slot for slot in self._ever if history.get(self._names[slot])}


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
