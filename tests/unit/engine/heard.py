"""Who hears of spans, in tests."""

from __future__ import annotations

from dataclasses import dataclass, field

from dearmpi.span import Span


@dataclass
class Heard:
    """A recorder that remembers."""

    spans: list[Span] = field(default_factory=list)

    def add(self, span: Span) -> None:
        self.spans.append(span)

    def named(self, name: str, iteration: int) -> Span:
        (span,) = (s for s in self.spans if s.name == name and s.iteration == iteration)
        return span

    def names(self) -> list[str]:
        return [span.name for span in self.spans]
