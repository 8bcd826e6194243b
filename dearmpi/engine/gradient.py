"""What stands in ``param.grad`` while the gradient itself is being reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dearmpi.errors import UsageError

_HARMLESS = frozenset(
    getattr(Tensor, name).__get__
    for name in ("dtype", "device", "shape", "layout", "is_sparse", "requires_grad", "grad_fn")
) | frozenset((Tensor.size, Tensor.dim, Tensor.numel))


class GradientUnderWay(Tensor):
    """A gradient that this rank no longer has: reading or changing it raises UsageError.

    It has the parameter's shape and dtype, and no memory of its own.
    """

    _name: str

    @staticmethod
    def of(param: Tensor, name: str) -> GradientUnderWay:
        """The stand-in for the gradient of ``param``, which is called ``name``."""
        empty = torch.zeros((), dtype=param.dtype, device=param.device).expand(param.shape)
        stand_in: GradientUnderWay = Tensor._make_subclass(GradientUnderWay, empty)
        stand_in._name = name
        return stand_in

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GradientUnderWay({self._name})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        names = sorted({one._name for one in _stand_ins(args)})
        raise UsageError(
            f"the gradient of {', '.join(names[:3]) or 'a parameter'} is being reduced over the "
            "ranks and cannot be read or changed. To step, call step() of the "
            "DistributedOptimizer, not of the optimizer in it. To clip, call "
            "optimizer.clip_grad_norm_(), with max_norm=inf to know the norm alone; with a "
            "gradient scaler, use dearmpi.GradScaler; to drop gradients, optimizer.zero_grad(); "
            "for local gradients, run backward inside optimizer.no_sync()"
        )


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


def _stand_ins(value: Any) -> list[GradientUnderWay]:
    if isinstance(value, GradientUnderWay):
        return [value]
    if isinstance(value, (list, tuple)):
        return [found for item in value for found in _stand_ins(item)]
    return []
