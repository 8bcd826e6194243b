"""Getting along with ``torch.compile``.

A compiled graph runs without hooks and reads parameters without looking them up, so nothing in it
can wait: who calls it has to. And while torch traces it says so of the whole process: an optimizer
that steps meanwhile on another thread would compute like a traced one, with its scalars in fp32.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TypeVar, cast

import torch
from torch import nn

from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.iteration.compiled_roots import CompiledFrame, CompiledRoots
from dearmpi.engine.sync.refused_models import refuse_active
from dearmpi.errors import ConfigError
from dearmpi.torch_internals import (
    CompileEvent,
    active_ddp,
    is_compiled,
    is_tracing,
    keep_out_of_callers,
    leave_out,
    not_compiling,
    number_of_backprop,
    unwatch_compilation,
    watch_compilation,
)

Function = TypeVar("Function", bound=Callable[..., object])


def run_as_it_is(function: Function) -> Function:
    """Have torch compile neither ``function`` nor what it calls, where compiled code calls it; a
    graph that it becomes a part of traces it all the same.
    """
    leave_out(function)
    return function


def untraced(function: Function) -> Function:
    """Have torch run ``function``, and all that it calls, as it is, where a compiled function
    steps or runs a backward.

    Marks its code, so that a call costs nothing: torch.compiler.disable(), for a torch that has
    another way of marking, makes each one slower.
    """
    if not leave_out(function):
        return cast("Function", torch.compiler.disable(function))
    keep_out_of_callers(function)
    return function


class CompilationWatch:
    """Marks ``buckets`` as unguarded once something is compiled that may read them and waits for
    nobody.
    """

    def __init__(
        self,
        buckets: Iterable[BucketRuntime],
        roots: CompiledRoots,
        synchronize: Callable[[], None],
        *,
        is_driver: Callable[[], bool],
    ) -> None:
        """``synchronize`` is called before torch begins to compile. ``is_driver``: whether the
        calling thread drives communication.
        """
        self._buckets, self._roots = tuple(buckets), roots
        self._synchronize, self._is_driver = synchronize, is_driver
        self._callback = _call_weakly(self._compiling)
        self.renew()

    def renew(self) -> None:
        """Watch from now on, also where ``torch.compiler.reset()`` has forgotten who does."""
        watch_compilation(self._callback)

    def remove(self) -> None:
        """Stop watching."""
        unwatch_compilation(self._callback)

    def _compiling(self, event: CompileEvent) -> None:
        if self._is_driver():  # the arithmetic of an optimizer, on the tensors that it is given
            return
        traces = is_tracing(event)
        # The code of a backprop is compiled when it is first needed, without being traced. It reads
        # no parameter that is updated before its gradient is there; and a wait might be for buckets
        # whose gradients only this code brings.
        if not traces and number_of_backprop() >= 0:
            return
        with not_compiling():  # tracing itself begins after this call
            self._synchronize()
        if active_ddp() is not None:
            refuse_active(param for bucket in self._buckets for param in bucket.params)
        if traces and not self._roots.admit(CompiledFrame.under_way()):
            self._mark()

    def _mark(self) -> None:
        for bucket in self._buckets:
            bucket.unguarded = True


def compiled_part(model: nn.Module) -> str | None:
    """The name of the first module of ``model`` that is compiled; empty if it is the whole one."""
    compiled = (name for name, module in model.named_modules() if is_compiled(module))
    return next(compiled, None)


def refuse_compiled(model: nn.Module) -> None:
    """Raise ConfigError if ``model``, or a part of it, is compiled and shall be planned for."""
    name = compiled_part(model)
    if name is not None:
        raise ConfigError(
            f"plan is 'auto', but {f'module {name}' if name else 'the model'} is compiled "
            "(torch.compile): its layers run without the hooks that time them; leave plan out, or "
            "give one that was made without compilation",
            code="plan-of-compiled-model",
        )


def _call_weakly(method: Callable[[CompileEvent], None]) -> Callable[[CompileEvent], None]:
    """A callback that keeps nobody alive."""
    reference = weakref.WeakMethod(method)

    def callback(event: CompileEvent) -> None:
        alive = reference()
        if alive is not None:
            alive(event)

    return callback
