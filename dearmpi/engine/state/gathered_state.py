"""What stands in ``optimizer.state`` while the state lies in the buckets' shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor

from dearmpi.engine import refusal
from dearmpi.torch_internals import version_of

Entries = Mapping[str, Any]


class GatheredState(MutableMapping[Tensor, Entries]):
    """The optimizer's state by parameter, gathered when it is read (collective).

    Every rank must read it, as a learning-rate scheduler that looks at it does. It is a copy: to
    change the state, use ``optimizer.load_state_dict()``. What would change the copy is refused;
    an assignment of what is there already is accepted, as frameworks make one that "move" state to
    the device where it is.
    """

    def __init__(self, gather: Callable[[], Mapping[Tensor, Entries]]) -> None:
        self._gather = gather
        self._gathered: Mapping[Tensor, Entries] | None = None
        self._versions: list[tuple[Tensor, int]] = []

    def check(self) -> None:
        """Raise UsageError if a tensor that was handed out has been changed."""
        if any(version_of(tensor) != version for tensor, version in self._versions):
            raise refusal.state_changed()

    def forget(self) -> None:
        """The state has changed: gather it anew when it is read."""
        self._gathered = None
        self._versions.clear()

    def __getitem__(self, param: Tensor) -> Entries:
        """The entries of ``param``; none if it has no state, as in torch."""
        return MappingProxyType(dict(self._whole().get(param, {})))

    def __setitem__(self, param: Tensor, entries: Entries) -> None:
        """Accept what is there already (collective, if it has to be gathered)."""
        if not _are_same_entries(entries, self._whole().get(param, {})):
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
                (value, version_of(value))
                for entries in self._gathered.values()
                for value in entries.values()
                if isinstance(value, Tensor)
            ]
        return self._gathered


def show_same(state: Mapping[Any, Any], other: object) -> bool:
    """Whether ``other`` is a mapping with the same entries for each parameter; it may have empty
    ones besides. Collective where ``state`` has to be gathered.
    """
    if not isinstance(other, Mapping):
        return False
    return all(
        _are_same_entries(other.get(param, {}), state.get(param, {}))
        for param in {**state, **other}
    )


def _are_same_entries(one: object, other: Entries) -> bool:
    if not isinstance(one, Mapping) or one.keys() != other.keys():
        return False
    return all(_is_same(one[key], value) for key, value in other.items())


def _is_same(one: Any, other: Any) -> bool:
    """Whether an entry is the other one, or equal to it: as a tensor with dtype and device."""
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        kind = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        return kind and torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
    if isinstance(one, Tensor) or isinstance(other, Tensor) or type(one) is not type(other):
        return False
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):  # tensors and arrays inside have no one truth value
        return False


def _refuse() -> NoReturn:
    raise TypeError(
        "optimizer.state is a copy, gathered from all ranks, and takes only what it shows already; "
        "to change the state, use optimizer.load_state_dict()"
    )
