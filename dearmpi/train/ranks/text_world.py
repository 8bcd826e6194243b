"""Text world: what it takes to let all ranks know a line of text."""

from __future__ import annotations

from typing import Protocol


class TextWorld(Protocol):
    """A rank's place, and an exchange with the others."""

    @property
    def rank(self) -> int: ...

    @property
    def host(self) -> str: ...

    def all_gather_text(self, text: str, /) -> list[str]: ...
