"""Private interfaces of torch, each as a small function; no other file uses one.

Each comment names the torch versions on which the interface was tried (2.6.0, 2.11.0, 2.13.0,
2.15.0), and what happens in a torch that lacks it. "Assumed" means that torch offers no public way
and there is no fallback: the import, or the first call, raises.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from operator import attrgetter
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch._dynamo import OptimizedModule, convert_frame
from torch._dynamo import callback as compile_callbacks
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import profiler
from torch.nn.modules import batchnorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer, lr_scheduler
from torch.utils._python_dispatch import _disable_current_modes

_Subclass = TypeVar("_Subclass", bound=Tensor)

# --- Backprop ------------------------------------------------------------------------------------

# The number of the backprop that this thread computes, with one of an activation checkpoint inside
# another counted apart; -1 outside. Tried on 2.11, 2.13, 2.15; assumed.
number_of_backprop: Callable[[], int] = torch._C._current_graph_task_id

# Called in a gradient hook: has its argument called once the backprop is computed. Documented for
# custom functions only. Tried on 2.11, 2.13, 2.15; assumed.
at_end_of_backprop: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)


# --- Modules -------------------------------------------------------------------------------------
# Tables of a module's own tensors and modules: a lookup by attribute or parameters() would wait for
# gathers, or copy. Named in torch's notes on modules. Tried on 2.11, 2.13, 2.15; assumed.


def parameter_table(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters of ``module`` itself by name, as the table that its attributes come from."""
    return module._parameters


def replace_parameter_table(module: nn.Module, table: dict[str, nn.Parameter | None]) -> None:
    """Have the parameters of ``module`` looked up in ``table``."""
    module._parameters = table


def forward_pre_hooks(module: nn.Module) -> Mapping[int, object]:
    """What is called before the forward of ``module`` itself."""
    return module._forward_pre_hooks


def buffer_table(module: nn.Module) -> dict[str, Tensor | None]:
    """The buffers of ``module`` itself by name."""
    return module._buffers


def module_table(module: nn.Module) -> dict[str, nn.Module | None]:
    """The modules directly in ``module`` by name."""
    return module._modules


def share_tables(module: nn.Module, *, with_module: nn.Module) -> None:
    """Give ``module`` the parameters and buffers of ``with_module``."""
    module._parameters, module._buffers = with_module._parameters, with_module._buffers


# The base class of torch's batch normalisations. Tried on 2.13, 2.15; assumed.
BatchNorm = batchnorm._BatchNorm


# --- Tensors -------------------------------------------------------------------------------------


def version_of(tensor: Tensor) -> int:
    """How often ``tensor`` was changed in place; torch raises RuntimeError for inference tensors.

    Tried on 2.11, 2.13, 2.15; assumed.
    """
    return tensor._version


_VERSION = attrgetter("_version")


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """``version_of`` each, in the least time."""
    return list(map(_VERSION, tensors))


def sparse_parts(tensor: Tensor) -> list[Tensor]:
    """Indices and values of a COO tensor as they are stored, where the public methods refuse one
    that is not coalesced. Tried on 2.13; assumed.
    """
    return [tensor._indices(), tensor._values()]


def storage_owners(storage: torch.UntypedStorage) -> int:
    """How many tensors and storages of C++ refer to the memory of ``storage``.

    Tried on 2.11, 2.13, 2.15; assumed.
    """
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


def make_subclass(kind: type[_Subclass], tensor: Tensor) -> _Subclass:
    """``tensor`` as one of ``kind``, with no initializer called.

    Tried on 2.11, 2.13, 2.15; ``Tensor.as_subclass`` where it is missing.
    """
    made: _Subclass
    if hasattr(Tensor, "_make_subclass"):
        made = Tensor._make_subclass(kind, tensor)
    else:
        made = tensor.as_subclass(kind)
    return made


def without_torch_function() -> AbstractContextManager[None]:
    """Inside, functions of torch treat subclasses of Tensor as plain tensors.

    Tried on 2.11, 2.13, 2.15; assumed.
    """
    context: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return context


# Asked of a parameter's gradient where torch compiles. Tried on 2.13; assumed.
IS_VIEW: Callable[[Tensor], bool] = Tensor._is_view


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, on a device with few kernels.

    Tried on 2.11, 2.13, 2.15; one by one where it is missing.
    """
    if _copy_all is not None:
        _copy_all(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


_copy_all: Callable[..., object] | None = getattr(torch, "_foreach_copy_", None)


def _functions(names: Mapping[str, str]) -> dict[Any, str]:
    found = ((getattr(torch, name, None), method) for name, method in names.items())
    return {function: method for function, method in found if function is not None}


# What torch's clipping functions call on lists of gradients, to the method of Tensor that does the
# same to one. Tried on 2.13; a missing function leaves no entry, as torch cannot call it.
NORMS_OF_LISTS = _functions({"_foreach_norm": "norm"})
CHANGES_OF_LISTS = _functions(
    {
        "_foreach_mul_": "mul_",
        "_foreach_div_": "div_",
        "_foreach_clamp_min_": "clamp_min_",
        "_foreach_clamp_max_": "clamp_max_",
    }
)


# --- Modes of a thread ---------------------------------------------------------------------------

_CASTING = ("cpu", "cuda")  # devices that have an autocast


def has_unusual_modes() -> bool:
    """Whether this thread computes in any mode of torch: inference, autocast, a default device, a
    selective checkpoint, or a transform of ``torch.func``.

    Tried on 2.13; assumed.
    """
    is_casting = any(map(torch.is_autocast_enabled, _CASTING))
    is_watched = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack() > 0
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
    return torch.is_inference_mode_enabled() or is_casting or is_watched or is_transformed


@contextmanager
def without_modes() -> Iterator[None]:
    """Inside, this thread computes as a new thread would, without gradients.

    Tried on 2.13; assumed.
    """
    with ExitStack() as left:
        left.enter_context(temporarily_clear_interpreter_stack())
        left.enter_context(_disable_current_modes())
        left.enter_context(torch._C.DisableTorchFunction())
        for device in _CASTING:
            left.enter_context(torch.autocast(device, enabled=False))
        left.enter_context(torch.inference_mode(False))
        left.enter_context(torch.no_grad())
        yield


def unwrapped(tensor: Tensor) -> Tensor:
    """What transforms of ``torch.func`` have wrapped in ``tensor``; else ``tensor`` itself.

    Tried on 2.13; assumed.
    """
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def is_profiling() -> bool:
    """Whether torch's profiler is on, in any thread. Tried on 2.11, 2.13, 2.15; assumed."""
    return bool(profiler._is_profiler_enabled)


# --- Optimizers ----------------------------------------------------------------------------------

# The attribute that a scheduler sets, and looks at to see that steps are taken. Tried on 2.11,
# 2.13, 2.15; in a torch without it the mark has no effect.
STEPPED_MARK = "_opt_called"

# The code of what torch puts around the step of an optimizer's class, to call hooks and to profile.
# Tried on 2.11, 2.13, 2.15; assumed.
_AROUND_STEPS: Any = Optimizer.profile_hook_step(lambda _: None).__code__


def plain_step(optimizer: Optimizer) -> Callable[[Optimizer], object]:
    """The step of the optimizer's class, without the hooks that torch calls around it."""
    step: Any = type(optimizer).step
    # By its code: what a script has put around a step may carry torch's marks as well.
    is_wrapped = getattr(step, "__code__", None) is _AROUND_STEPS
    plain: Callable[[Optimizer], object] = step.__wrapped__ if is_wrapped else step
    return plain


def is_patched(optimizer: Optimizer) -> bool:
    """Whether a script has put another ``step`` on the instance. Schedulers do so too, but only to
    see that it is called, and do not count. Tried on 2.13.
    """
    step: Any = vars(optimizer).get("step")
    step = getattr(step, "__func__", step)
    while getattr(step, "__globals__", None) is vars(lr_scheduler):
        step = step.__wrapped__
    return step is not None and step is not type(optimizer).step


def call_with_step_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """``step``, whose first argument is an optimizer, with the hooks that torch calls around steps.

    Tried on 2.13; assumed.
    """
    hooked: Callable[..., Any] = Optimizer.profile_hook_step(step)
    return hooked


def share_step_hooks(optimizer: Optimizer, inner: Optimizer) -> None:
    """Have steps of ``optimizer`` and ``inner`` call the hooks that either is given.

    Tried on 2.13; a torch that keeps them elsewhere calls those of ``optimizer`` alone.
    """
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if name in vars(optimizer) and name in vars(inner):
            vars(optimizer)[name] = vars(inner)[name]


def mark_scheduled(step: Callable[..., Any]) -> Callable[..., Any]:
    """Have schedulers leave ``step`` as it is, which sets STEPPED_MARK by itself.

    Tried on 2.13; a torch that looks for another mark puts its own step around this one.
    """
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


def save_with_hooks(optimizer: Optimizer, save: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A state dict by ``save``, with the hooks that torch calls around ``state_dict()``.

    Tried on 2.13; assumed.
    """
    for before in optimizer._optimizer_state_dict_pre_hooks.values():
        before(optimizer)
    state_dict = save()
    for after in optimizer._optimizer_state_dict_post_hooks.values():
        changed = after(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    return state_dict


def load_with_hooks(
    optimizer: Optimizer, state_dict: dict[str, Any], load: Callable[[dict[str, Any]], None]
) -> None:
    """``load`` a state dict, with the hooks that torch calls around ``load_state_dict()``.

    Tried on 2.13; assumed.
    """
    state_dict = state_dict.copy()
    for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = before(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    load(state_dict)
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)


# --- Data-parallel wrappers of torch -------------------------------------------------------------


class _NeverActive:
    """Stands for DistributedDataParallel in a torch that does not show which one is active."""

    _active_ddp_module = None


_Wrapper: Any = (
    DistributedDataParallel
    if hasattr(DistributedDataParallel, "_active_ddp_module")
    else _NeverActive
)


active_ddp: Callable[[], Any] = partial(attrgetter("_active_ddp_module"), _Wrapper)
"""The DistributedDataParallel, also of ``replicate()``, whose forward is running; None outside.

No function of Python's, since each module's forward asks. Tried on 2.13; None in a torch that does
not show it, whose wrapper goes unnoticed.
"""


def is_flat_shard(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a flat parameter of FullyShardedDataParallel.

    Tried on 2.13; False in a torch without these marks.
    """
    return getattr(tensor, "_is_flat_param", False) or getattr(tensor, "_fsdp_flattened", False)


def ignored_by_ddp(module: nn.Module) -> Collection[str]:
    """Names of parameters and buffers that a script has told DistributedDataParallel to leave out.

    Tried on 2.13; none in a torch that keeps them otherwise.
    """
    found: Collection[str] = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return found


COMPOSABLE = "torch.distributed._composable"
"""Where ``replicate`` and ``fully_shard`` are; imported by some frameworks, and seldom called.

Tried on 2.13; nothing is called from it in a torch without.
"""


def composed_apis(module: nn.Module) -> Collection[str]:
    """The names of torch's composable APIs, such as ``replicate``, that ``module`` was given to.

    Tried on 2.13; none in a torch without this registry.
    """
    contract = sys.modules.get(f"{COMPOSABLE}.contract")
    registry = getattr(contract, "_get_registry", None)
    return () if registry is None else registry(module) or ()


# --- Compilation ---------------------------------------------------------------------------------
# On 2.11 models whose blocks are compiled one by one fail their tests.


# What a callback of ``watch_compilation`` is given; nothing on 2.6.
CompileEvent = Any
_HANDLER = compile_callbacks.callback_handler


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` is one that torch.compile made, or was compiled in place.

    Tried on 2.13; assumed.
    """
    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None


def leave_out(function: Callable[..., object]) -> bool:
    """Have torch compile no frame of ``function``; False where torch offers no way.

    Marks its code, so that a call costs nothing. Tried on 2.11, 2.13, 2.15.
    """
    assert isinstance(function, FunctionType)
    try:
        skip = eval_frame._FrameAction.SKIP
        strategy = eval_frame._FrameExecStrategy(skip, skip)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
    except AttributeError:
        return False
    return True


def disable(function: Callable[..., object]) -> Callable[..., object]:
    """``torch.compiler.disable(function)``, also for a method that a script compiles.

    Of a bound method of what ``disable`` returns, torch 2.6 compiles the plain function behind this
    mark, and loses the object. Tried on 2.6; without effect where there is no such mark.
    """
    disabled: Callable[..., object] = torch.compiler.disable(function)
    vars(disabled).pop("_torchdynamo_orig_callable", None)
    return disabled


def keep_out_of_callers(function: Callable[..., object]) -> None:
    """Have torch not trace ``function`` as a part of its caller. Tried on 2.13, 2.15."""
    vars(function)["_torchdynamo_disable"] = True


def watch_compilation(callback: Callable[[CompileEvent], None]) -> None:
    """Have ``callback`` called before torch compiles; once, however often this is called.

    Tried on 2.13, 2.15; assumed.
    """
    if callback not in _HANDLER.start_callbacks:
        _HANDLER.register_start_callback(callback)


def unwatch_compilation(callback: Callable[[CompileEvent], None]) -> None:
    """Call ``callback`` no more."""
    if callback in _HANDLER.start_callbacks:
        _HANDLER.remove_start_callback(callback)


def is_tracing(event: CompileEvent) -> bool:
    """Whether what torch is about to compile is traced; the code of a backprop is not.

    Tried on 2.11, 2.13, 2.15; True on 2.6, which does not show it.
    """
    trigger = getattr(event, "callback_trigger", None)
    return trigger is None or trigger.name == "DYNAMO"


@contextmanager
def not_compiling() -> Iterator[None]:
    """Inside, ``torch.compiler.is_compiling()`` is False, as in a callback before tracing begins.

    Tried on 2.13, 2.15; assumed.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = False
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


_COMPILES = getattr(getattr(convert_frame, "_compile", None), "__code__", None)

# Whether compiled code may call ``dict.__getitem__`` on a subclass. Tried on 2.11, 2.13; False on
# 2.6, which cannot trace it.
TRACES_DICT_METHODS: bool = torch.__version__ >= "2.11"

# Whether ``frame_to_compile`` finds anything. False on 2.6, 2.8, 2.11, which chain their entries: a
# step there waits for all that a compiled model reads.
SHOWS_FRAMES: bool = "cache_entries" in getattr(_COMPILES, "co_varnames", ())


def frame_to_compile() -> tuple[CodeType, Mapping[str, Any], Sequence[Any]] | None:
    """What a callback of ``watch_compilation`` is called for: code, its variables, and the entries
    that torch has made of the code before; None where torch does not show them.

    Read off the frame of torch's own function. Tried on 2.13, 2.14, 2.15.
    """
    caller: FrameType | None = sys._getframe()
    while caller is not None and caller.f_code is not _COMPILES:
        caller = caller.f_back
    seen = {} if caller is None else caller.f_locals
    try:
        return seen["code"], seen["locals"], seen["cache_entries"]
    except KeyError:
        return None


def accepts(entries: Sequence[Any], values: Mapping[str, Any]) -> bool:
    """Whether one of ``entries``, by ``frame_to_compile``, holds for variables of ``values``; True
    in a torch that keeps them otherwise. Tried on 2.13, 2.15.
    """
    try:
        return any(entry.guard_manager.check(values) for entry in entries)
    except AttributeError:
        return True
