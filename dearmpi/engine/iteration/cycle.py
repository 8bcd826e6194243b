"""Cycle: what is true of one iteration's communication only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dearmpi.engine.update.update import Options
from dearmpi.plan.data.schedule import AllGather


@dataclass(slots=True)
class Cycle:
    """From the first gradient of a backprop to the last all-gather of its step.

    reduce_scatters, all_gathers: in the order in which they are submitted.
    active: buckets with a parameter that requires grad; the others take no part.
    options: hyperparameters for the update; None until they are known.
    stepped: whether the user has called ``step()``.
    stepping: the main thread is in the middle of submitting that step. A signal handler may read
        parameters there. So may a script after an exception has ended ``step()`` there.
    unfilled: buckets that this rank's backprop has not filled by itself; once the ranks have told
        each other, that any of theirs has not.
    used: from then on, for each bucket, a byte for each parameter: 0 if none had a gradient for it.
    launched: buckets whose reduce-scatter is submitted; its lane posts it when its turn comes.
    reduced: those of which it is complete.
    num_submitted: how many of ``all_gathers``, from the first on, are submitted; one of a bucket
        that takes no part counts as well.
    num_finished: buckets whose parameters are current again.
    """

    reduce_scatters: tuple[int, ...] = ()
    all_gathers: tuple[AllGather, ...] = ()
    active: frozenset[int] = frozenset()
    options: Options | None = None
    stepped: bool = False
    stepping: bool = False
    unfilled: frozenset[int] = frozenset()
    used: Sequence[bytes] | None = None
    launched: set[int] = field(default_factory=set)
    reduced: set[int] = field(default_factory=set)
    num_submitted: int = 0
    num_finished: int = 0

    def rewind(self) -> None:
        """Begin the lanes anew for a further backprop of the same iteration."""
        self.launched.clear()
        self.reduced.clear()
        self.num_submitted = 0
