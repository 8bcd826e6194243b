"""Compiled roots: modules that torch compiles each as a whole, and who waits before they run.

Inside a compiled graph nothing can wait. But torch calls a module's hooks before the graph of its
forward, so that a hook of the root can wait for all that the graph reads. It goes to every module
of the same code, since torch may use the graph of one for another without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import nn

from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.torch_internals import accepts, frame_to_compile, parameter_table

Guard = Callable[[nn.Module, Sequence[BucketRuntime]], None]


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
        again for who waits for nobody. By then the old graph would do; it would not where inputs
        have another shape.
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
