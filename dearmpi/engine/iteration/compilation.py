"""Getting along with ``torch.compile``.

A compiled graph runs without hooks and reads parameters without looking them up, so nothing in it
can wait: its caller has to. And torch marks the whole process as traced while it traces: an
optimizer that steps meanwhile on another thread would compute its scalars in fp32.

But torch calls a module's hooks before the graph of its forward. So a hook of a module that is
compiled as a whole can wait for all that the graph reads. It goes to every module of the same code,
since torch may use the graph of one for another without a word.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, TypeVar, cast

from torch import nn

from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.sync.refused_models import refuse_active
from dearmpi.errors import ConfigError
from dearmpi.torch_internals import (
    CompileEvent,
    accepts,
    active_ddp,
    disable,
    frame_to_compile,
    is_compiled,
    is_tracing,
    keep_out_of_callers,
    leave_out,
    not_compiling,
    number_of_backprop,
    parameter_table,
    unwatch_compilation,
    watch_compilation,
)

Function = TypeVar("Function", bound=Callable[..., object])
Guard = Callable[[nn.Module, Sequence[BucketRuntime]], None]


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
        return cast("Function", disable(function))
    keep_out_of_callers(function)
    return function


@dataclass(frozen=True, slots=True)
class CompiledFrame:
    """What torch is about to compile: ``code``, with ``values`` by the names of its variables.

    made: what torch has made of that code before.
    """

    code: CodeType
    values: Mapping[str, Any]
    made: Sequence[Any]

    @classmethod
    def under_way(cls) -> CompiledFrame | None:
        """The one that a callback of torch's is called for; None where torch does not show it."""
        seen = frame_to_compile()
        return None if seen is None else cls(*seen)

    @property
    def owner(self) -> Any:
        """The first argument."""
        code = self.code
        return self.values.get(code.co_varnames[0]) if code.co_argcount else None

    def holds(self) -> bool:
        """Whether a graph that was made before holds now, or may for all that torch shows."""
        return accepts(self.made, self.values)


class CompiledRoots:
    """Of one model, by what torch compiles of it."""

    def __init__(
        self, model: nn.Module, reads: Mapping[nn.Module, Sequence[BucketRuntime]], guard: Guard
    ) -> None:
        """``reads``: the buckets that hold parameters of a module itself. ``guard``: to have a
        module wait for buckets whenever it is called.
        """
        self._modules = tuple(model.modules())
        self._reads, self._guard = reads, guard
        self._guarded: set[CodeType] = set()

    def admit(self, frame: CompiledFrame | None) -> bool:
        """Whether what runs ``frame`` waits for the parameters that it reads, as far as is known:
        to be asked when nothing is unread.

        A graph holds only while nothing is unread that it reads, so that torch compiles its code
        again for a caller that does not wait. By then the old graph would do; it would not where
        inputs have another shape.
        """
        if frame is None or _calls_some_module(frame.code):
            return False
        if frame.code not in self._guarded and self._is_root(frame):
            self._guard_all(frame.code)  # perhaps made for another model, which had none to wait
            return True
        return not frame.holds()

    def _is_root(self, frame: CompiledFrame) -> bool:
        owner, code = frame.owner, frame.code
        return any(module is owner and _forward_of(module) is code for module in self._modules)

    def _guard_all(self, code: CodeType) -> None:
        self._guarded.add(code)
        for module in self._modules:
            if _forward_of(module) is code and (read := self._read_in(module)):
                self._guard(module, read)

    def _read_in(self, module: nn.Module) -> Sequence[BucketRuntime]:
        owned = (bucket for part in module.modules() for bucket in self._reads.get(part, ()))
        return tuple(dict.fromkeys(owned))


def _forward_of(module: nn.Module) -> CodeType | None:
    return getattr(type(module).forward, "__code__", None)


def _calls_some_module(code: CodeType) -> bool:
    """Whether it is what torch compiles for any layer of its own that is wrapped: of such code one
    module cannot be told from another.
    """
    return code.co_qualname.startswith("wrap_inline.")


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
        """Watch from now on, also where ``torch.compiler.reset()`` has removed all watchers."""
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


def buckets_by_module(
    model: nn.Module, places: Mapping[nn.Parameter, tuple[BucketRuntime, int]]
) -> dict[nn.Module, Sequence[BucketRuntime]]:
    """The buckets that hold parameters of a module itself, for those that have any."""
    reads: dict[nn.Module, Sequence[BucketRuntime]] = {}
    for module in model.modules():
        owned = (places.get(param) for param in own_parameters(module))
        if buckets := tuple(dict.fromkeys(place[0] for place in owned if place is not None)):
            reads[module] = buckets
    return reads


def own_parameters(module: nn.Module) -> Iterable[nn.Parameter]:
    """Those of a module itself, not of modules in it."""
    return (param for param in parameter_table(module).values() if param is not None)


def compiled_part(model: nn.Module) -> str | None:
    """The name of the first module of ``model`` that is compiled; empty if it is the whole one."""
    compiled = (name for name, module in model.named_modules() if is_compiled(module))
    return next(compiled, None)


def refuse_compiled(model: nn.Module, setting: str = "plan") -> None:
    """Raise ConfigError if ``model``, or a part of it, is compiled, and ``setting`` needs times."""
    name = compiled_part(model)
    if name is not None:
        raise ConfigError(
            f"{setting} is 'auto', but {f'module {name}' if name else 'the model'} is compiled "
            "(torch.compile): its layers run without the hooks that time them; leave "
            f"{setting} out, or give one that was found without compilation",
            code="plan-of-compiled-model",
        )


def _call_weakly(method: Callable[[CompileEvent], None]) -> Callable[[CompileEvent], None]:
    """A callback that keeps nobody alive."""
    reference = weakref.WeakMethod(method)

    def callback(event: CompileEvent = None) -> None:
        alive = reference()
        if alive is not None:
            alive(event)

    return callback
