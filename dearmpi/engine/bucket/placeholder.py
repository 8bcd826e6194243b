"""What stands in ``param.grad`` while the gradient itself is being reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import ReferenceType

import torch
from torch import Tensor

from dearmpi.errors import UsageError
from dearmpi.torch_internals import (
    CHANGES_OF_LISTS,
    NORMS_OF_LISTS,
    make_subclass,
    without_torch_function,
)

_HARMLESS = frozenset(
    getattr(Tensor, name).__get__
    for name in ("dtype", "device", "shape", "layout", "is_sparse", "requires_grad", "grad_fn")
) | frozenset((Tensor.size, Tensor.dim, Tensor.numel))


# Norms of all elements: the keyword of their type, and the types that are such a norm.
_NORMS: Mapping[Any, tuple[str, int]] = {
    torch.linalg.vector_norm: ("ord", 2),
    torch.norm: ("p", 2),
    Tensor.norm: ("p", 2),
    **dict.fromkeys(NORMS_OF_LISTS, ("ord", 2)),
}
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
    **CHANGES_OF_LISTS,
}
_SAME = frozenset((Tensor.detach, Tensor.data.__get__))  # type: ignore[attr-defined]


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


class GradPlaceholder(Tensor):
    """A placeholder for a gradient that is being averaged over the ranks.

    It has the parameter's shape and dtype, and no memory of its own. Its norms are the
    norms of the whole averaged gradient. A change that treats each element by itself, as torch's
    clipping functions make, changes the averaged gradient. Every rank must do the same. All else
    raises UsageError.
    """

    _name: str
    _place: tuple[int, int]
    _gradients: Callable[[], AveragedGradients | None]

    @staticmethod
    def of(param: Tensor, name: str) -> GradPlaceholder:
        """The placeholder for the gradient of ``param``, which is called ``name``."""
        empty = torch.zeros((), dtype=param.dtype, device=param.device).expand(param.shape)
        placeholder: GradPlaceholder = make_subclass(GradPlaceholder, empty)
        placeholder._name = name
        placeholder._place = (0, 0)
        placeholder._gradients = lambda: None
        return placeholder

    def serve_from(
        self, gradients: ReferenceType[AveragedGradients], bucket: int, slot: int
    ) -> None:
        """Ask ``gradients``, which this does not keep alive, for ``slot`` of ``bucket``."""
        self._gradients, self._place = gradients, (bucket, slot)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GradPlaceholder({self._name})"

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
        if func in _NORMS and (norm_type := _norm_type(func, *args[1:], **kwargs)) is not None:
            return _each(args[0], lambda one: _norm(one, norm_type, kwargs.get("dtype")))
        method = _CHANGES.get(func)
        if method and all(map(_is_number, (*args[1:], *kwargs.values()))):
            return _each(args[0], lambda one: _change(one, method, args[1:], kwargs))
        raise _refused(_placeholders(args))


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
    if isinstance(value, (list, tuple)):
        return [found for item in value for found in _placeholders(item)]
    return []
