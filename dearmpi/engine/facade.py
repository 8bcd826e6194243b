"""Facade: what of torch's Optimizer stands before another one, which does the work; and what stands
in ``optimizer.state`` while the state lies in the buckets' shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from dearmpi.config import EngineConfig
from dearmpi.engine import usage_errors
from dearmpi.engine.state.optimizer_state import MODES, has_mode, show_held
from dearmpi.guessed import OPTIMIZER, answer_guess
from dearmpi.torch_internals import (
    STEPPED_MARK,
    load_with_hooks,
    save_with_hooks,
    share_step_hooks,
    version_of,
)

_SHARED = ("param_groups", "state")


class Facade(Optimizer):
    """An optimizer with the param groups of ``_optimizer``, in whose place it stands.

    Whatever a script does to param groups or state that would not reach the other is refused: at
    once, or in the next ``step``.
    """

    _optimizer: Optimizer
    _members: list[list[Tensor]]
    _attributes: dict[str, Any]

    if not TYPE_CHECKING:  # which would take any name for one that there is

        def __getattr__(self, name: str) -> Any:
            """``train`` and ``eval`` where the wrapped optimizer has them.

            Raises AttributeError for others; names of other libraries lead to those here.
            """
            if name in MODES and has_mode(vars(self).get("_optimizer"), name):
                return partial(self._switch, name)
            advice = answer_guess(type(self).__name__, name, OPTIMIZER)
            if advice is not None:
                raise AttributeError(advice)
            return super().__getattribute__(name)  # raises as if this method were not there

    def __reduce__(self) -> NoReturn:
        raise usage_errors.copied()

    def __setattr__(self, name: str, value: Any) -> None:
        if "_members" in vars(self):
            if name in _SHARED and value is not vars(self)[name]:
                if name == "state" and show_same(vars(self)[name], value):
                    return
                raise usage_errors.assigned(name)
            # Where the wrapped one alone has such a thing, it is meant.
            if name in vars(self._optimizer) and name != STEPPED_MARK and not hasattr(self, name):
                raise usage_errors.set_on_optimizer(name)
        super().__setattr__(name, value)

    @property
    def config(self) -> EngineConfig:
        """The settings as they are by now."""
        raise NotImplementedError

    def scale_gradients_(self, factor: float) -> bool:
        """Multiply all gradients by ``factor``; False if any was inf or NaN (collective)."""
        raise NotImplementedError

    def follow_loss_scale(self, read: Callable[[], float]) -> None:
        """Losses are multiplied by what ``read`` returns at the start of each backward."""
        raise NotImplementedError

    def _clear_state(self) -> None:
        """Have the wrapped optimizer begin anew, with the same options."""
        raise NotImplementedError

    def _switch(self, mode: str) -> None:
        """Call the wrapped optimizer's ``train()`` or ``eval()`` for the parameters."""
        raise NotImplementedError

    def _share(
        self,
        gather: Callable[[], Mapping[Tensor, Entries]] | None,
        name_of: NameOf,
        *,
        trains: bool = False,
    ) -> None:
        """Show the param groups as they are now, and the state: what ``gather`` brings,
        collectively, or that of the wrapped optimizer, which has it.

        trains: while it does, in the wrapped one's place, steps call the hooks of either, and the
            wrapped one's own state says who holds its entries.
        """
        if trains:
            share_step_hooks(self, self._optimizer)
        show_held(self._optimizer, is_held=trains)
        groups = self._optimizer.param_groups
        state: Mapping[Tensor, Entries] = self._optimizer.state
        if gather is not None:
            state = GatheredState(gather, name_of, self._clear_state)
        vars(self).update(param_groups=groups, state=state)
        self._members = [list(group["params"]) for group in groups]
        self._attributes = dict(vars(self._optimizer))

    def _save(self, pack: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What ``pack`` returns, with the hooks of ``state_dict`` called around it."""
        return save_with_hooks(self, pack)

    def _load(
        self, state_dict: dict[str, Any], take_over: Callable[[dict[str, Any]], None]
    ) -> None:
        """Have ``take_over`` called, and around it the hooks of ``load_state_dict``."""
        load_with_hooks(self, state_dict, take_over)

    def _mark_stepped(self) -> None:
        """A scheduler made for the wrapped optimizer looks whether that one's step was called."""
        vars(self._optimizer)[STEPPED_MARK] = True

    def _check_shared(self) -> None:
        """Raise UsageError if param groups have other parameters, or the state shown was changed.
        Also if the wrapped optimizer has attributes that its copies, one for each bucket, have not.

        Called in each step: what is the same is compared in a microsecond.
        """
        if self.param_groups is not self._optimizer.param_groups:
            raise usage_errors.divorced()
        try:
            differ = [list(group["params"]) for group in self.param_groups] != self._members
        except RuntimeError:  # one tensor compared with another has no truth value
            differ = True
        if differ:
            raise usage_errors.regrouped()
        if isinstance(self.state, GatheredState):
            self.state.check()
            self._check_attributes()

    def _forget_gathered(self) -> None:
        """The state has changed: gather it anew when it is read."""
        if isinstance(self.state, GatheredState):
            self.state.forget()

    def _check_attributes(self) -> None:
        now, before = vars(self._optimizer), self._attributes
        if _are_same(now, before):
            return
        for name in {**before, **now}:
            is_method = callable(getattr(type(self._optimizer), name, None))
            if is_method or name == STEPPED_MARK:  # such as the step, which schedulers watch
                continue
            if name not in now or name not in before or not _are_same(now[name], before[name]):
                raise usage_errors.set_on_optimizer(name)
        self._attributes = dict(now)


def _are_same(one: Any, other: Any) -> bool:
    """Whether they are equal; identical ones are, and are not looked at any further."""
    try:
        return one is other or bool(one == other)
    except (RuntimeError, ValueError):  # tensors and arrays have no one truth value
        return False


Entries = Mapping[str, Any]
NameOf = Callable[[Tensor], str]


class GatheredState(MutableMapping[Tensor, Entries]):
    """The optimizer's state by parameter, gathered when it is read (collective).

    Its copies are plain dicts.

    Every rank must read it, as a learning-rate scheduler that looks at it does. It is a copy: to
    change the state, use ``optimizer.load_state_dict()``. ``clear()`` has the optimizer begin
    anew; what else would change the copy is refused. An assignment of what is there already is
    accepted, as frameworks make one that "move" state to the device where it is.
    """

    def __init__(
        self,
        gather: Callable[[], Mapping[Tensor, Entries]],
        name_of: NameOf,
        clear: Callable[[], None],
    ) -> None:
        """``name_of``: a parameter's name, for errors."""
        self._gather, self._name_of, self._clear = gather, name_of, clear
        self._gathered: Mapping[Tensor, Entries] | None = None
        self._watched: list[tuple[str, Tensor, int, str]] = []

    def check(self) -> None:
        """Raise UsageError if a tensor that was handed out has been changed."""
        for place, tensor, version, digest in self._watched:
            if version_of(tensor) != version or _digest(tensor) != digest:
                raise usage_errors.state_changed(place)

    def forget(self) -> None:
        """The state has changed: gather it anew when it is read."""
        self._gathered = None
        self._watched.clear()

    def __getitem__(self, param: Tensor) -> Entries:
        """The entries of ``param``; none if it has no state, as in torch."""
        return GatheredEntries(self._whole().get(param, {}), self._place(param))

    def __setitem__(self, param: Tensor, entries: Entries) -> None:
        """Accept what is there already (collective, if it has to be gathered)."""
        if not _are_same_entries(entries, self._whole().get(param, {})):
            _refuse(self._place(param))

    def __delitem__(self, param: Tensor) -> NoReturn:
        if param not in self:
            raise KeyError(param)
        _refuse(self._place(param))

    def __ior__(self, other: Mapping[Tensor, Entries]) -> Self:
        self.update(other)
        return self

    def clear(self) -> None:
        """Have the optimizer begin anew; every rank must do so before the same step."""
        self._clear()
        self.forget()

    def pop(self, param: Tensor, *default: Any) -> Any:
        """The default where ``param`` has no state; else it is refused."""
        return _pop(self, param, default)

    def setdefault(self, param: Tensor, default: Any = None) -> Any:
        """The entries of ``param``; refused where there are none, unless ``default`` is empty."""
        if param not in self and default:
            _refuse(self._place(param))
        return self[param]

    def __contains__(self, param: object) -> bool:
        return param in self._whole()

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._whole())

    def __len__(self) -> int:
        return len(self._whole())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ({param: dict(entries) for param, entries in self.items()},)

    def __repr__(self) -> str:
        return "GatheredState(read it on every rank, or with optimizer.state_dict())"

    def _whole(self) -> Mapping[Tensor, Entries]:
        if self._gathered is None:
            with torch.inference_mode(False):  # whose tensors count no changes
                self._gathered = self._gather()
            self._watched = [
                (f"{self._place(param)}[{key!r}]", value, version_of(value), _digest(value))
                for param, entries in self._gathered.items()
                for key, value in entries.items()
                if isinstance(value, Tensor)
            ]
        return self._gathered

    def _place(self, param: object) -> str:
        if not isinstance(param, Tensor):
            return f"optimizer.state[{param!r}]"
        return f"optimizer.state[{self._name_of(param)}]"


class GatheredEntries(dict[str, Any]):
    """The entries of one parameter in a gathered state; its copies are plain dicts.

    It takes what it has already, and refuses what would change it. A framework assigns the same
    entries when it moves each tensor to the device where it is.
    """

    def __init__(self, entries: Entries, place: str = "optimizer.state[...]") -> None:
        super().__init__(entries)
        self._place = place

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self or not _is_same(value, self[key]):
            _refuse(f"{self._place}[{key!r}]")

    def __delitem__(self, key: str) -> None:
        _refuse(f"{self._place}[{self._existing(key)!r}]")

    def __ior__(self, other: Any) -> Self:  # type: ignore[override,misc]
        self.update(other)
        return self

    def update(self, *others: Any, **more: Any) -> None:
        """Accept what is there already."""
        for key, value in dict(*others, **more).items():
            self[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        """The entry that there is; another is refused."""
        if key not in self:
            _refuse(f"{self._place}[{key!r}]")
        return self[key]

    def pop(self, key: str, *default: Any) -> Any:
        """The default where there is no such entry; else it is refused."""
        return _pop(self, key, default)

    def popitem(self) -> tuple[str, Any]:
        """Refused, unless there is nothing."""
        key = next(reversed(self), None)
        if key is None:
            raise KeyError("popitem(): dictionary is empty")
        _refuse(f"{self._place}[{key!r}]")

    def clear(self) -> None:
        """Refused, unless there is nothing."""
        if self:
            _refuse(self._place)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def _existing(self, key: str) -> str:
        if key not in self:
            raise KeyError(key)
        return key


def _pop(mapping: MutableMapping[Any, Any], key: Any, default: tuple[Any, ...]) -> Any:
    """As ``dict.pop``, of a mapping that refuses to lose what it has."""
    if key not in mapping and default:
        return default[0]
    del mapping[key]
    raise AssertionError("what is there cannot be deleted")


def _digest(tensor: Tensor) -> str:
    """Differs where a script has changed values past torch's count, as by ``.data`` and numpy."""
    if tensor.device.type not in ("cpu", "cuda") or tensor.layout is not torch.strided:
        return ""
    values = tensor.detach()
    total = values.sum(dtype=torch.complex128 if values.is_complex() else torch.float64)
    return f"{tuple(values.shape)} {values.data_ptr()} {total.item()!r}"


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


def _refuse(place: str) -> NoReturn:
    raise TypeError(
        f"{place} cannot be changed: optimizer.state is a copy, gathered from all ranks, and takes "
        "only what it shows already; to change the state, use optimizer.load_state_dict(), or "
        "optimizer.state.clear() to begin anew"
    )
