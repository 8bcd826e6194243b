"""Parameters that a script reads past their modules, as from a list that it has kept.

After a step its values may be on their way. What reads a parameter through its module waits. Until
the wrapper's next forward each parameter has another class, so that what reads it waits as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from weakref import WeakSet, ref

from torch import Tensor, nn

from dearmpi.torch_internals import (
    CompileEvent,
    is_tracing,
    watch_compilation,
    without_torch_function,
)

_HARMLESS = frozenset(
    accessor
    for name in ("grad", "requires_grad")
    for accessor in (getattr(Tensor, name).__get__, getattr(Tensor, name).__set__)
) | frozenset(
    getattr(Tensor, name).__get__
    for name in ("dtype", "device", "shape", "layout", "ndim", "is_leaf", "is_sparse", "is_cuda")
)


class _PendingParameter(nn.Parameter):
    """What a parameter is meanwhile."""

    thread: ClassVar[int]
    pending: ClassVar[Callable[[], PendingParameters | None]]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        pending = cls.pending()
        if func in _HARMLESS or pending is None or threading.get_ident() != cls.thread:
            with without_torch_function():
                return func(*args, **kwargs)
        pending.show()
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._shown().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._shown().__reduce_ex__(protocol)

    def _shown(self) -> nn.Parameter:
        if (pending := type(self).pending()) is not None:
            pending.show()
        self.__class__ = nn.Parameter  # type: ignore[assignment]
        return self


class PendingParameters:
    """Those of one optimizer, of torch's own class."""

    _all: ClassVar[WeakSet[PendingParameters]] = WeakSet()
    _watches = False
    _is_compiled = False  # something in this process: graphs ask for the class of parameters

    def __init__(self, params: Sequence[nn.Parameter], wait: Callable[[], None]) -> None:
        """``wait``: until all show the last step."""
        self._params = [param for param in params if type(param) is nn.Parameter]
        self._wait, self._are_marked = wait, False
        attributes = {"thread": 0, "pending": ref(self)}
        self._class = type("Parameter", (_PendingParameter,), attributes)
        PendingParameters._all.add(self)
        if not PendingParameters._watches:
            PendingParameters._watches = True
            watch_compilation(_before_compilation)

    def mark(self) -> None:
        """The calling thread has taken a step."""
        if PendingParameters._is_compiled:
            return
        self._are_marked = True
        self._class.thread = threading.get_ident()  # type: ignore[attr-defined]
        for param in self._params:
            param.__class__ = self._class

    def unmark(self) -> None:
        """Modules wait by themselves from now on."""
        if self._are_marked:
            self._are_marked = False
            for param in self._params:
                param.__class__ = nn.Parameter

    def show(self) -> None:
        """Wait until all show the last step."""
        self.unmark()
        self._wait()


def _before_compilation(event: CompileEvent) -> None:
    if is_tracing(event):
        PendingParameters._is_compiled = True
        for pending in list(PendingParameters._all):
            pending.unmark()
