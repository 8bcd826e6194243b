"""What stands in ``optimizer.state`` while the state lies in the buckets' shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor

from dearmpi.engine import refusal

Entries = Mapping[str, Any]


class GatheredState(MutableMapping[Tensor, Entries]):
    """The optimizer's state by parameter, gathered when it is read (collective).

    Every rank must read it, as a learning-rate scheduler that looks at it does. It is a copy: to
    change the state, use ``optimizer.load_state_dict()``. What would change the copy is refused.
    """

    def __init__(self, gather: Callable[[], Mapping[Tensor, Entries]]) -> None:
        self._gather = gather
        self._gathered: Mapping[Tensor, Entries] | None = None
        self._versions: list[tuple[Tensor, int]] = []

    def check(self) -> None:
        """Raise UsageError if a tensor that was handed out has been changed."""
        if any(tensor._version != version for tensor, version in self._versions):
            raise refusal.state_changed()

    def forget(self) -> None:
        """The state has changed: gather it anew when it is read."""
        self._gathered = None
        self._versions.clear()

    def __getitem__(self, param: Tensor) -> Entries:
        """The entries of ``param``; none if it has no state, as in torch."""
        return MappingProxyType(dict(self._whole().get(param, {})))

    def __setitem__(self, param: Tensor, entries: Entries) -> NoReturn:
        _refuse()

    def __delitem__(self, param: Tensor) -> NoReturn:
        _refuse()

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
            with torch.inference_mode(False):  # whose tensors count no changes
                self._gathered = self._gather()
            self._versions = [
                (value, value._version)
                for entries in self._gathered.values()
                for value in entries.values()
                if isinstance(value, Tensor)
            ]
        return self._gathered


def _refuse() -> NoReturn:
    raise TypeError(
        "optimizer.state is a copy, gathered from all ranks; to change the state, use "
        "optimizer.load_state_dict()"
    )
