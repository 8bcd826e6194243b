"""Wrappers of torch that average or shard parameters themselves, each refused by its name.

A wrapper that is there when the optimizer is made shows in the model. One that comes later shows in
the first forward, or when it puts other parameters into the model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType

from torch import Tensor, distributed, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from dearmpi.engine.model.model_tensors import model_tensors
from dearmpi.errors import ConfigError, UsageError
from dearmpi.torch_internals import active_ddp, composed_apis, is_flat_shard

_CURE = (
    "leave it out and call the module itself, since the DistributedOptimizer averages gradients "
    "over all ranks"
)
_SHARDED = (
    "leave it out, since the DistributedOptimizer averages gradients over all ranks, and with "
    "gather='parameters' it shards the optimizer's state"
)
_REPLICATED = "was given to replicate(), which averages gradients"
_SHARING_OPTIMIZERS = {
    "ZeroRedundancyOptimizer": "shards the state as the DistributedOptimizer does",
    "PostLocalSGDOptimizer": "averages parameters, where the DistributedOptimizer averages "
    "gradients in each step",
}
_MOST_FRAMES = 16  # from a module's table up to the wrapper that changes it


def refuse_wrappers(model: nn.Module) -> None:
    """Raise ConfigError if ``model``, or a part of it, is averaged or sharded by torch."""
    for name, module in model.named_modules():
        found = _wrapper_of(module)
        if found:
            what, cure = found
            who = f"module {name} of the model" if name else "the model"
            raise ConfigError(f"{who} {what}; {cure}", code="wrapped-model")
    for _, name, tensor in model_tensors(model):
        kind = _sharded_kind(tensor)
        if kind:
            raise ConfigError(
                f"parameter or buffer {name} is {kind}, of which each rank holds a part; "
                f"{_SHARDED}, and pass the module as it was before",
                code="parameter-sharded",
            )


def refuse_optimizer_wrappers(optimizer: Optimizer) -> None:
    """Raise ConfigError for an optimizer of torch's that shares its work with other ranks."""
    for name, what in _SHARING_OPTIMIZERS.items():
        if _is_of(optimizer, "torch.distributed.optim", name):
            raise ConfigError(
                f"optimizer is a {name}, which {what}; leave it out, and pass the optimizer that "
                "it was made with or of, such as torch.optim.AdamW(model.parameters())",
                code="wrapped-optimizer",
            )


def _wrapper_of(module: nn.Module) -> tuple[str, str] | None:
    """What ``module`` is or uses that does not go together with the optimizer, and the cure."""
    if isinstance(module, DistributedDataParallel):
        return (
            "is a DistributedDataParallel, which averages gradients as the DistributedOptimizer "
            "does",
            "leave it out, and train and pass the module in it (model.module)",
        )
    if isinstance(module, DataParallel) and len(module.device_ids) > 1:
        return (
            f"is a DataParallel over {len(module.device_ids)} devices of one rank",
            "leave it out, and launch one rank for each device",
        )
    if _is_of(module, "torch.distributed.fsdp", "FullyShardedDataParallel"):
        return (
            "is a FullyShardedDataParallel, which shards its parameters",
            f"{_SHARDED}, and pass the module that went into it",
        )
    if _is_of(module, "torch.distributed.fsdp", "FSDPModule"):
        if any(kind.__name__ == "ReplicateModule" for kind in type(module).__mro__):
            return _REPLICATED, _CURE
        return "was given to fully_shard() (FSDP), which shards its parameters", _SHARDED
    if "replicate" in composed_apis(module):
        return _REPLICATED, _CURE
    return None


def refuse_active(params: Iterable[nn.Parameter | None]) -> None:
    """Raise UsageError if the DistributedDataParallel whose forward is running reduces the gradient
    of one of ``params``, which the optimizer reduces too.
    """
    active = active_ddp()
    own = {id(param) for param in params if param is not None and param.requires_grad}
    ignored = getattr(active, "parameters_to_ignore", ())
    for _, name, tensor in model_tensors(active.module):
        if id(tensor) in own and name not in ignored:
            composed = isinstance(active.module, nn.ParameterList)
            wrapper = "replicate()" if composed else "DistributedDataParallel"
            raise UsageError(
                f"the model is called through torch's {wrapper}, which averages the gradients that "
                f"its DistributedOptimizer averages too; {_CURE}",
                code="wrapped-model",
            )


def refuse_replicated(modules: Iterable[nn.Module]) -> None:
    """Raise UsageError if one of ``modules`` was given to replicate() after the optimizer was made.

    Its hook runs after the optimizer's, so the wrapper is not active yet when that one looks.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    if any("replicate" in composed_apis(module) for module in modules):
        raise UsageError(f"a module of the model {_REPLICATED}; {_CURE}", code="wrapped-model")


def refuse_sharded(name: str, param: Tensor | None) -> None:
    """Raise UsageError if ``param`` is sharded, which takes the place of parameter ``name``, or for
    None, if FullyShardedDataParallel takes parameter ``name`` away.
    """
    kind = None
    if param is not None:
        kind = _sharded_kind(param)
    elif _is_called_from("torch.distributed.fsdp"):
        kind = "a part of torch's FullyShardedDataParallel (FSDP)"
    if kind:
        raise UsageError(
            f"parameter {name} becomes {kind} after its DistributedOptimizer was made, which would "
            f"no longer update it; {_SHARDED}",
            code="parameter-sharded",
        )


def _sharded_kind(tensor: Tensor) -> str | None:
    """What ``tensor`` is if it is a part of one that is spread over ranks."""
    if _is_of(tensor, "torch.distributed.tensor", "DTensor"):
        return "a DTensor (of FSDP's fully_shard(), or of tensor parallelism)"
    if is_flat_shard(tensor):
        return "a parameter of torch's FullyShardedDataParallel (FSDP)"
    return None


def _is_of(value: object, home: str, kind: str) -> bool:
    """Whether ``value`` is of the class ``kind`` in the module ``home``, which costs a second to
    import: where nobody has, there is no such value.
    """
    known = getattr(sys.modules.get(home), kind, None)
    return known is not None and isinstance(value, known)


def _is_called_from(package: str) -> bool:
    """Whether a function of ``package`` is among the nearest callers."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return False
        if str(frame.f_globals.get("__name__", "")).startswith(package):
            return True
        frame = frame.f_back
    return False
