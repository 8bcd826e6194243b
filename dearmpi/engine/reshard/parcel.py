"""Parcels: pieces of optimizer state that change hands, fused into one message for each rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Place = tuple[int, str]
"""A rank, and the name of a dtype."""


@dataclass(frozen=True, slots=True)
class Part:
    """Elements ``start`` to ``stop`` of a parameter's state ``key``, from rank to rank."""

    name: str
    key: str
    dtype: str
    source: int
    target: int
    start: int
    stop: int


class Parcels:
    """A tensor in host memory for each rank and dtype, in which parts lie in their order.

    A model has hundreds of small tensors, so that a message for each would be far too many.
    """

    def __init__(self, parts: Sequence[tuple[int, Part]], known: Mapping[Place, Tensor]) -> None:
        """parts: each with the rank on the other side. known: parcels that are there already."""
        self._sizes: dict[Place, list[int]] = defaultdict(list)
        for rank, part in parts:
            self._sizes[rank, part.dtype].append(part.stop - part.start)
        self.tensors = {
            place: known[place]
            if place in known
            else torch.empty(sum(sizes), dtype=getattr(torch, place[1]), device="cpu")
            for place, sizes in sorted(self._sizes.items())
        }

    def of(self, rank: int) -> dict[Place, Tensor]:
        """Those with ``rank`` on the other side."""
        return {place: tensor for place, tensor in self.tensors.items() if place[0] == rank}

    def to_others(self, rank: int) -> list[tuple[int, Tensor]]:
        """Those with another rank than ``rank`` on the other side, which is named with each."""
        return [(other, tensor) for (other, _), tensor in self.tensors.items() if other != rank]

    def pieces(self) -> dict[Place, Iterator[Tensor]]:
        """The parts' elements, in their order."""
        return {place: iter(t.split(self._sizes[place])) for place, t in self.tensors.items()}
