"""Call: one collective call of the world or of an optimizer, which ranks compare."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from dearmpi.comm.api.stack import stack_of

_CURES = {
    "state_dict": "call state_dict() on every rank, and write the file on rank 0",
    "clip_grad_norm_": "call clip_grad_norm_() on every rank, and log the norm on rank 0",
}
_CURE = "make the same collective calls on every rank, in the same order, with as many values"


def cure_for(*calls: str) -> str:
    """What to do if ranks are in different ones of ``calls``."""
    return next((_CURES[key] for call in calls for key in _CURES if key in call), _CURE)


@dataclass(frozen=True, slots=True)
class Call:
    """One rank's collective call.

    name: the call in the script, such as ``optimizer.state_dict()``.
    operation: the exchange that it makes; ranks must agree on both.
    thread: the thread that waits for it, whose stack shows the place of the call.
    """

    name: str
    operation: str
    thread: int

    def __str__(self) -> str:
        return self.name if self.name == self.operation else f"{self.name} ({self.operation})"

    @property
    def digest(self) -> bytes:
        """An eight-byte hash of name and operation."""
        return hashlib.blake2b(str(self).encode(), digest_size=8).digest()

    def describe(self) -> str:
        """The call and its place in the script."""
        stack = stack_of(self.thread)
        place = stack[-1].rpartition(" ")[0] if stack else "an unknown place"
        return f"{self}, called at {place}"
