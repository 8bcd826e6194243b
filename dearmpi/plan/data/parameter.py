"""Parameter: what a plan needs to know of a tensor, by duck typing, since plans know no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from dearmpi.plan.data.layout import ParamSpec


class Parameter(Protocol):
    """What is asked of a ``torch.nn.Parameter``."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> Any: ...

    @property
    def device(self) -> Any: ...

    @property
    def requires_grad(self) -> bool: ...

    def element_size(self) -> int: ...


def spec_of(param: Parameter, name: str) -> ParamSpec:
    """``param`` under its name in the model; of its device the kind, since ranks number theirs."""
    return ParamSpec(
        name,
        tuple(param.shape),
        itemsize=param.element_size(),
        dtype=str(param.dtype).removeprefix("torch."),
        device=str(param.device).partition(":")[0],
        trained=param.requires_grad,
    )
