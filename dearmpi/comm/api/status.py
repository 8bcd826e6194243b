"""Status: what a rank says of itself to another that waits for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Status:
    """What a rank says of itself.

    backprops, steps, exchanges: how many backprops with communication, how many steps, and how
        many collective calls on the world, its main thread has begun.
    waiting: for what, or empty. in_exchange: it waits inside a collective call on the world.
    left: its program has come to its end. in_iteration: it has begun a backprop, and no step since.
    """

    backprops: int
    steps: int
    exchanges: int
    waiting: str
    waited_s: float
    in_exchange: bool
    left: bool
    stack: tuple[str, ...]
    in_iteration: bool = False

    def describe(self, *, waited: str | None = None) -> str:
        """One line, without the stack. ``waited``: how long, in other words."""
        if self.left:
            where = ", between a backward and its step" if self.in_iteration else ""
            return f"has ended after {self.backprops} backprops{where}"
        if not self.waiting:
            return f"has begun {self.backprops} backprops, does not wait for communication"
        if waited is None:
            waited = f"{self.waited_s:.0f} s"
        return f"has begun {self.backprops} backprops, waits {waited} for {self.waiting}"

    def waits_for(self, other: Status) -> bool:
        """Whether this wait certainly cannot end before ``other`` does something more.

        Of ranks that run one program the counts of one are never both above and below another's.
        """
        if not self.waiting:
            return False
        if self.in_exchange:
            return other.exchanges < self.exchanges
        return (other.backprops, other.steps) < (self.backprops, self.steps)
