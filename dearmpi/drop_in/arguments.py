"""What the arguments and hooks of torch's DistributedDataParallel mean here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from dearmpi import World
from dearmpi.config import CommDtype
from dearmpi.errors import ArgumentError, ConfigError

_WITHOUT_MEANING: Mapping[str, Any] = {
    "output_device": None,
    "dim": 0,
    "init_sync": True,
    "find_unused_parameters": False,
    "check_reduction": False,
    "gradient_as_bucket_view": False,
    "static_graph": False,
    "skip_all_reduce_unused_params": False,
    "bucket_cap_mb_list": None,
    "batched_grad_copy": False,
    "lazy_bucket_allocation": False,  # of torch 2.15
}
"""Accepted, with the default of each: other values change nothing, or not the numbers."""

_REFUSED: Mapping[str, str] = {
    "delay_all_reduce_named_params": "leave it out: all parameters are reduced during backward",
    "param_to_hook_all_reduce": "leave it out: all parameters are reduced during backward",
    "mixed_precision": "use torch.autocast, or the half-precision hooks of register_comm_hook()",
    "device_mesh": "leave it out: a job trains one model on all of its ranks",
}

_HOOKS: Mapping[Callable[..., Any], CommDtype] = {
    default_hooks.allreduce_hook: "fp32",
    default_hooks.fp16_compress_hook: "fp16",
    default_hooks.bf16_compress_hook: "bf16",
}

_IN_PLACE_OF_HOOKS: Mapping[str, str] = {
    "fp16_compress_wrapper_hook": "register fp16_compress_hook without a wrapper",
    "bf16_compress_wrapper_hook": "register bf16_compress_hook without a wrapper",
    "powerSGD_hook": "give --compress powersgd before the script",
    "batched_powerSGD_hook": "give --compress powersgd before the script",
    "quantization_pertensor_hook": "give --compress int8 before the script",
    "quantization_perchannel_hook": "give --compress int8 before the script",
    "post_localSGD_hook": "use dearmpi.LocalOptimizer",
    "noop_hook": "leave DistributedDataParallel out",
}

ARGUMENTS = frozenset((*_WITHOUT_MEANING, *_REFUSED, "process_group", "forward_sync_buffers"))
"""Those that ``check`` looks at."""


class OtherArguments(TypedDict, total=False):
    """Those of torch's that the wrapper's signature does not have by name."""

    find_unused_parameters: bool
    check_reduction: bool
    gradient_as_bucket_view: bool
    static_graph: bool
    skip_all_reduce_unused_params: bool
    bucket_cap_mb_list: list[int] | None
    batched_grad_copy: bool
    lazy_bucket_allocation: bool
    forward_sync_buffers: bool | None
    delay_all_reduce_named_params: object
    param_to_hook_all_reduce: object
    mixed_precision: object
    device_mesh: object


def note(world: World, text: str) -> None:
    """Print one line on rank 0."""
    if world.is_root:
        print(f"dearmpi: {text}", file=sys.stderr, flush=True)


def check(world: World, given: Mapping[str, Any]) -> None:
    """Print which of the arguments have no meaning here.

    Raises ArgumentError for one that cannot be served, and for an unknown one.
    """
    for name, value in given.items():
        if name not in ARGUMENTS:
            raise ArgumentError(
                f"DistributedDataParallel has no argument {name}; it has those of torch 2.13",
                code="unknown-argument",
            )
        if value is not None and name in _REFUSED:
            raise ArgumentError(
                f"DistributedDataParallel cannot serve {name}; {_REFUSED[name]}",
                code="ddp-not-served",
            )
    _check_group(world, given.get("process_group"))
    ignored = [n for n, v in given.items() if v != _WITHOUT_MEANING.get(n, v)]
    if ignored:
        note(world, f"DistributedDataParallel needs no {', '.join(ignored)}; accepted")


def _check_group(world: World, group: Any) -> None:
    if not distributed.is_initialized():
        return
    size = distributed.get_world_size()
    if size != world.size:
        raise ArgumentError(
            f"torch.distributed has {size} ranks, but DistributedDataParallel averages over all "
            f"{world.size} of the job; call init_process_group() with no rank and world_size, or "
            "with those of RANK and WORLD_SIZE",
            code="ddp-not-served",
        )
    if group is not None and (size := distributed.get_world_size(group)) != world.size:
        raise ArgumentError(
            f"DistributedDataParallel got a process_group of {size} ranks, but averages over all "
            f"{world.size} of the job; leave it out, or start a job for each model",
            code="ddp-not-served",
        )


def comm_dtype_of(hook: Callable[..., Any]) -> CommDtype:
    """The precision of gradients on the wire that a communication hook asks for.

    Raises ConfigError for a hook that does something else.
    """
    if hook in _HOOKS:
        return _HOOKS[hook]
    name = getattr(hook, "__name__", repr(hook))
    served = ", ".join(known.__name__ for known in _HOOKS)
    cure = _IN_PLACE_OF_HOOKS.get(
        name, f"it serves {served} of torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
    )
    raise ConfigError(
        f"register_comm_hook() cannot serve {name}; {cure}",
        code="ddp-not-served",
    )
