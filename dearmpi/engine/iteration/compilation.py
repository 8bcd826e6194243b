"""Getting along with ``torch.compile``.

A compiled graph runs without hooks and reads parameters without looking them up, so nothing in it
can wait: who calls it has to. And while torch traces it says so of the whole process: an optimizer
that steps meanwhile on another thread would compute like a traced one, with its scalars in fp32.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import TypeVar, cast

import torch
from torch import nn
from torch._C._dynamo import eval_frame
from torch._dynamo import OptimizedModule
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler

from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.iteration.compiled_roots import CompiledFrame, CompiledRoots
from dearmpi.engine.model.wrappers import ActiveWrapper, refuse_active
from dearmpi.errors import ConfigError

# torch counts them, those that activation checkpoints run inside another included; else -1.
number_of_backprop: Callable[[], int] = torch._C._current_graph_task_id

# For a hook in a backprop: to be called when all of it has been computed.
at_end_of_backprop: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)

Function = TypeVar("Function", bound=Callable[..., object])


def run_as_it_is(function: Function) -> Function:
    """Have torch compile neither ``function`` nor what it calls, where compiled code calls it; a
    graph that it becomes a part of traces it all the same.
    """
    _leave_out(function)
    return function


def untraced(function: Function) -> Function:
    """Have torch run ``function``, and all that it calls, as it is, where a compiled function
    steps or runs a backward.

    Marks its code, so that a call costs nothing: torch.compiler.disable(), for a torch that has
    another way of marking, makes each one slower.
    """
    if not _leave_out(function):
        return cast("Function", torch.compiler.disable(function))
    vars(function)["_torchdynamo_disable"] = True  # nor is it traced as a part of its caller
    return function


def _leave_out(function: Callable[..., object]) -> bool:
    """Whether torch could be told to compile no frame of ``function``."""
    assert isinstance(function, FunctionType)
    try:
        skip = eval_frame._FrameAction.SKIP
        strategy = eval_frame._FrameExecStrategy(skip, skip)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
    except AttributeError:
        return False
    return True


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
        if self._callback not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._callback)

    def remove(self) -> None:
        """Stop watching."""
        if self._callback in callback_handler.start_callbacks:
            callback_handler.remove_start_callback(self._callback)

    def _compiling(self, event: CallbackArgs) -> None:
        if self._is_driver():  # the arithmetic of an optimizer, on the tensors that it is given
            return
        traces = event.callback_trigger is CallbackTrigger.DYNAMO
        # The code of a backprop is compiled when it is first needed, without being traced. It reads
        # no parameter that is updated before its gradient is there; and a wait might be for buckets
        # whose gradients only this code brings.
        if not traces and number_of_backprop() >= 0:
            return
        compiling = torch.compiler._is_compiling_flag
        torch.compiler._is_compiling_flag = False  # tracing itself begins after this call
        try:
            self._synchronize()
        finally:
            torch.compiler._is_compiling_flag = compiling
        if ActiveWrapper._active_ddp_module is not None:
            refuse_active(param for bucket in self._buckets for param in bucket.params)
        if traces and not self._roots.admit(CompiledFrame.under_way()):
            self._mark()

    def _mark(self) -> None:
        for bucket in self._buckets:
            bucket.unguarded = True


def compiled_part(model: nn.Module) -> str | None:
    """The name of the first module of ``model`` that is compiled; empty if it is the whole one."""
    compiled = (
        name
        for name, module in model.named_modules()
        if isinstance(module, OptimizedModule) or module._compiled_call_impl is not None
    )
    return next(compiled, None)


def refuse_compiled(model: nn.Module) -> None:
    """Raise ConfigError if ``model``, or a part of it, is compiled and shall be planned for."""
    name = compiled_part(model)
    if name is not None:
        raise ConfigError(
            f"plan is 'auto', but {f'module {name}' if name else 'the model'} is compiled "
            "(torch.compile): its layers run without the hooks that time them; leave plan out, or "
            "give one that was made without compilation"
        )


def _call_weakly(method: Callable[[CallbackArgs], None]) -> Callable[[CallbackArgs], None]:
    """A callback that keeps nobody alive."""
    reference = weakref.WeakMethod(method)

    def callback(event: CallbackArgs) -> None:
        alive = reference()
        if alive is not None:
            alive(event)

    return callback
