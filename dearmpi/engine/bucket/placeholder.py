"""What stands in ``param.grad`` while the gradient itself is being reduced."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import ReferenceType

import torch
from torch import Tensor

from dearmpi.errors import UsageError
from dearmpi.torch_internals import (
    CHANGES_OF_LISTS,
    IS_VIEW,
    NORMS_OF_LISTS,
    make_subclass,
    without_torch_function,
)

# The compiler looks at the gradients that parameters have, and at the base of one that is a view.
_HARMLESS = frozenset(
    getattr(Tensor, name).__get__
    for name in (
        *("dtype", "device", "shape", "layout", "is_sparse", "requires_grad", "grad_fn"),
        *("ndim", "is_leaf", "is_cuda", "itemsize", "nbytes"),
    )
) | frozenset(
    (Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size)
    + (Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__, Tensor.__hash__, IS_VIEW)
)

# Norms of all elements: the keyword of their type, and the types that are such a norm.
_NORMS: Mapping[Any, tuple[str, int]] = {
    torch.linalg.vector_norm: ("ord", 2),
    torch.norm: ("p", 2),
    Tensor.norm: ("p", 2),
    **dict.fromkeys(NORMS_OF_LISTS, ("ord", 2)),
}
# A script that logs calls these on one rank alone; torch's clipping calls the others.
_NORMS_OF_SCRIPTS = frozenset((torch.norm, Tensor.norm))
# Changes in place that treat every element by itself: each rank makes them where it owns elements.
_CHANGES: Mapping[Any, str] = {
    Tensor.mul_: "mul_",
    Tensor.__imul__: "mul_",
    Tensor.div_: "div_",
    Tensor.__itruediv__: "div_",
    Tensor.clamp_: "clamp_",
    Tensor.clip_: "clamp_",
    Tensor.clamp_min_: "clamp_min_",
    Tensor.clamp_max_: "clamp_max_",
    torch.clamp_: "clamp_",
    torch.clamp_min_: "clamp_min_",
    torch.clamp_max_: "clamp_max_",
    Tensor.nan_to_num_: "nan_to_num_",
    torch.nan_to_num_: "nan_to_num_",
    Tensor.zero_: "zero_",
    torch.zero_: "zero_",
    Tensor.neg_: "neg_",
    torch.neg_: "neg_",
    Tensor.sign_: "sign_",
    **CHANGES_OF_LISTS,
}
_SAME = frozenset((Tensor.detach, Tensor.data.__get__))  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_READING = frozenset(("__int__", "__index__", "__invert__", "__iter__"))
_MOVING = frozenset((Tensor.set_, Tensor.resize_, Tensor.resize_as_))
_PLAIN = (type(None), bool, int, float, complex, str, torch.Size, torch.dtype, torch.device)


class AveragedGradients(Protocol):
    """What a placeholder asks for the gradient that it stands for."""

    def norm(self, bucket: int, slot: int, norm_type: float) -> float:
        """The norm of the averaged gradient, the same on every rank (collective)."""
        ...

    def change(
        self, bucket: int, slot: int, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Change the averaged gradient in place by a method of Tensor."""
        ...

    def keeps_whole(self, *, now: bool) -> bool:
        """Whether ``whole`` may be called; ``now``: and needs no exchange any more."""
        ...

    def whole(self, bucket: int, slot: int) -> Tensor:
        """The whole averaged gradient, to read or to change (collective before the step)."""
        ...

    def changed(self, bucket: int, slot: int, how: str) -> None:
        """The script has changed the ``whole`` gradient in place."""
        ...

    def lend(self, bucket: int) -> None:
        """The script may hold a view of a ``whole`` gradient for as long as it likes."""
        ...


class GradPlaceholder(Tensor):
    """A placeholder for a gradient that is being averaged over the ranks.

    It has the parameter's shape and dtype, and no memory of its own. Its norms are the
    norms of the whole averaged gradient. A change that treats each element by itself, as torch's
    clipping functions make, changes the averaged gradient. Every rank must do the same. All else
    raises UsageError, or where the engine keeps gradients works on the whole averaged gradient.
    """

    _name: str
    _place: tuple[int, int]
    _gradients: Callable[[], AveragedGradients | None]
    _kept: Tensor | None

    @staticmethod
    def of(param: Tensor, name: str) -> GradPlaceholder:
        """The placeholder for the gradient of ``param``, which is called ``name``."""
        empty = torch.zeros((), dtype=param.dtype, device=param.device).expand(param.shape)
        placeholder: GradPlaceholder = make_subclass(GradPlaceholder, empty)
        placeholder._name = name
        placeholder._place = (0, 0)
        placeholder._gradients = lambda: None
        placeholder._kept = None
        return placeholder

    def serve_from(
        self, gradients: ReferenceType[AveragedGradients], bucket: int, slot: int
    ) -> None:
        """Ask ``gradients``, which this does not keep alive, for ``slot`` of ``bucket``."""
        self._gradients, self._place = gradients, (bucket, slot)

    def stay(self, whole: Tensor) -> None:
        """Show ``whole`` from now on, whatever becomes of the engine."""
        self._kept, self._gradients = whole, lambda: None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self._is_served(now=True):  # else one rank that prints would wait for the others
            return repr(self._whole())
        return f"GradPlaceholder({self._name})"

    def _is_served(self, *, now: bool) -> bool:
        if self._kept is not None:
            return True
        gradients = self._gradients()
        return gradients is not None and gradients.keeps_whole(now=now)

    def _whole(self) -> Tensor:
        if self._kept is not None:
            return self._kept
        gradients = self._gradients()
        assert gradients is not None, "is_served has looked"
        return gradients.whole(*self._place)

    def _note(self, how: str | None, *, lent: bool) -> None:
        gradients = self._gradients()
        if gradients is not None and how is not None:
            gradients.changed(*self._place, how)
        if gradients is not None and lent:
            gradients.lend(self._place[0])

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _HARMLESS:
            with without_torch_function():
                return func(*args, **kwargs)
        if func in _SAME:
            return args[0]
        found = _placeholders((args, kwargs))
        is_alone = func in _NORMS_OF_SCRIPTS  # perhaps: other ranks would have to take part
        if found and all(one._is_served(now=not is_alone) for one in found):
            return _on_whole(func, args, kwargs, found)
        if func in _NORMS and (norm_type := _norm_type(func, *args[1:], **kwargs)) is not None:
            return _each(args[0], lambda one: _norm(one, norm_type, kwargs.get("dtype")))
        method = _CHANGES.get(func)
        if method and all(map(_is_number, (*args[1:], *kwargs.values()))):
            return _each(args[0], lambda one: _change(one, method, args[1:], kwargs))
        if found and all(one._is_served(now=False) for one in found):
            return _on_whole(func, args, kwargs, found)
        raise _refused(found)


def _on_whole(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    placeholders: Sequence[GradPlaceholder],
) -> Any:
    """What ``func`` does with the whole gradients in the place of their ``placeholders``."""
    if func in _MOVING:
        raise _refused(placeholders)
    wholes = {id(one): one._whole() for one in placeholders}
    if func == _SET_DATA:  # each look-up makes another object
        func = Tensor.copy_
    found = func(*_with_wholes(args, wholes), **_with_wholes(kwargs, wholes))
    name = getattr(func, "__name__", "")
    writes = "out" in kwargs or (name.endswith("_") and not name.endswith("__"))
    writes |= name.startswith(("__i", "__setitem__")) and name not in _READING
    for one in placeholders:
        lent = _shares(found, wholes[id(one)])
        one._note(name if writes else None, lent=lent)
    return _shown(found, {id(wholes[id(one)]): one for one in placeholders})


def _with_wholes(value: Any, wholes: Mapping[int, Tensor]) -> Any:
    """``value`` with whole gradients in the place of placeholders, in containers as well."""
    if isinstance(value, GradPlaceholder):
        return wholes[id(value)]
    if type(value) in (list, tuple):
        return type(value)(_with_wholes(item, wholes) for item in value)
    if isinstance(value, dict):
        return {key: _with_wholes(item, wholes) for key, item in value.items()}
    return value


def _shown(found: Any, placeholders: Mapping[int, GradPlaceholder]) -> Any:
    """``found`` with placeholders in the place of their whole gradients: of changes in place."""
    if isinstance(found, Tensor):
        return placeholders.get(id(found), found)
    if type(found) in (list, tuple):
        return type(found)(_shown(item, placeholders) for item in found)
    return found


def _shares(found: Any, whole: Tensor) -> bool:
    """Whether ``found`` is, or may hold, a view of ``whole``; itself does not count."""
    if found is whole or isinstance(found, _PLAIN):
        return False
    if isinstance(found, Tensor) and found.layout is torch.strided:
        return found.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    if type(found) in (list, tuple):
        return any(_shares(item, whole) for item in found)
    return True


def held_elsewhere(placeholders: tuple[GradPlaceholder, ...], slots: Iterable[int]) -> list[int]:
    """Which of ``slots``, in the ``grad`` of no parameter, a script refers to."""
    return [slot for slot in slots if sys.getrefcount(placeholders[slot]) > _UNHELD]


@contextmanager
def without_gradients(params: Sequence[Tensor]) -> Iterator[None]:
    """Inside, what ``params`` have accumulated takes no part; it is there again at the end."""
    # Copies: what is accumulated lies in the buffers that are used meanwhile.
    kept = [(param, param.grad.clone()) for param in params if param.grad is not None]
    for param, _ in kept:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in kept:
            param.grad = grad


def _norm_type(func: Any, *args: Any, dtype: Any = None, **kwargs: Any) -> float | None:
    """The type of the norm over all elements that ``func`` is called for; None for another norm."""
    keyword, default = _NORMS[func]
    given = args[0] if args else kwargs.pop(keyword, default)
    given = 2 if given in ("fro", None) and keyword == "p" else given
    if len(args) > 1 or any(value is not None and value is not False for value in kwargs.values()):
        return None  # along some dimensions alone, or written somewhere
    try:
        return float(given)
    except (TypeError, ValueError):
        return None


def _is_number(value: Any) -> bool:
    """Whether ``value``, None included, is the same for all elements."""
    if isinstance(value, Tensor):
        return value.dim() == 0 and not isinstance(value, GradPlaceholder)
    return value is None or isinstance(value, (int, float, complex))


def _each(given: Any, act: Callable[[Tensor], Any]) -> Any:
    """What ``act`` makes of a tensor, or of each in a list."""
    return act(given) if isinstance(given, Tensor) else [act(one) for one in given]


def _norm(one: Tensor, norm_type: float, dtype: torch.dtype | None) -> Tensor:
    if not isinstance(one, GradPlaceholder):
        norm_of_own: Tensor = torch.linalg.vector_norm(one, norm_type, dtype=dtype)
        return norm_of_own
    if (gradients := one._gradients()) is None:
        raise _refused([one])
    with without_torch_function():
        dtype, device = dtype or one.dtype, one.device
    norm = gradients.norm(*one._place, norm_type)
    real = dtype.to_real() if dtype.is_complex else dtype
    return torch.tensor(norm, dtype=real, device=device)


def _change(one: Tensor, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    if not isinstance(one, GradPlaceholder):
        getattr(one, method)(*args, **kwargs)
    elif (gradients := one._gradients()) is None:
        raise _refused([one])
    else:
        gradients.change(*one._place, method, args, kwargs)
    return one


def _refused(placeholders: Sequence[GradPlaceholder]) -> UsageError:
    names = sorted({one._name for one in placeholders})
    return UsageError(
        f"the gradient of {', '.join(names[:3]) or 'a parameter'} is being reduced over the "
        "ranks and cannot be read or changed in this way. To look at it, call "
        "optimizer.gradients() on every rank. To step, call step() of the "
        "DistributedOptimizer, not of the optimizer in it. To clip, call "
        "optimizer.clip_grad_norm_() or torch's functions; with a "
        "gradient scaler, use dearmpi.GradScaler; to drop gradients, optimizer.zero_grad(); "
        "for local gradients, run backward inside optimizer.no_sync()",
        code="gradient-in-reduction",
    )


def _placeholders(value: Any) -> list[GradPlaceholder]:
    if isinstance(value, GradPlaceholder):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [found for item in value for found in _placeholders(item)]
    return []


def _references_of_one() -> int:
    """To a placeholder that nothing but a tuple holds, as ``held_elsewhere`` counts them."""
    placeholders = (GradPlaceholder.of(torch.empty(1, device="cpu"), ""),)
    return sys.getrefcount(placeholders[0])


_UNHELD = _references_of_one()
