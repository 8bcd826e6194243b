"""What stands in ``optimizer.state`` while the state lies in the buckets' shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

Entries = Mapping[str, Any]


class GatheredState(Mapping[Tensor, Entries]):
    """The optimizer's state by parameter, gathered when it is read (collective).

    Every rank must read it, as a learning-rate scheduler that looks at it does. It is a copy: to
    change the state, use ``optimizer.load_state_dict()``.
    """

    def __init__(self, gather: Callable[[], Mapping[Tensor, Entries]]) -> None:
        self._gather = gather
        self._gathered: Mapping[Tensor, Entries] | None = None

    def forget(self) -> None:
        """The state has changed: gather it anew when it is read."""
        self._gathered = None

    def __getitem__(self, param: Tensor) -> Entries:
        """The entries of ``param``; none if it has no state, as in torch."""
        return MappingProxyType(dict(self._whole().get(param, {})))

    def __contains__(self, param: object) -> bool:
        return param in self._whole()

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._whole())

    def __len__(self) -> int:
        return len(self._whole())

    def __repr__(self) -> str:
        return "GatheredState(read it on every rank, or with optimizer.state_dict())"

    def _whole(self) -> Mapping[Tensor, Entries]:
        if self._gathered is None:
            self._gathered = self._gather()
        return self._gathered
