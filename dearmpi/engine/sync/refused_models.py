"""Models that would go wrong beside an optimizer of several ranks, each refused by what it has.

- Layouts, lazy tensors and modules that cannot be served.
- Tensors that share memory without being one.
- Wrappers of torch that average or shard parameters themselves. A wrapper that is there when the
  optimizer is made shows in the model. A later one shows when it puts other parameters into the
  model, or in the first forward through it.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Iterator, Mapping
from types import FrameType

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from dearmpi.config import Buffers
from dearmpi.engine.sync.batch_norm import SyncBatchNorm
from dearmpi.engine.sync.model_tensors import model_tensors
from dearmpi.errors import ConfigError, UsageError
from dearmpi.torch_internals import COMPOSABLE, active_ddp, composed_apis, is_flat_shard

_ADDED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def refuse_lazy(model: nn.Module) -> None:
    """Raise ConfigError for parameters and buffers whose shape the first forward decides."""
    for _, name, tensor in model_tensors(model):
        if is_lazy(tensor):
            raise ConfigError(
                f"parameter or buffer {name} is not initialized (a lazy module, such as "
                "nn.LazyLinear), so it cannot be laid out in a bucket; run one forward first on "
                "every rank (with torch.no_grad(): model(inputs)), and make the optimizer then",
                code="tensor-without-values",
            )


def refuse_layouts(names: Mapping[nn.Parameter, str]) -> None:
    """Only dense elements of a kind that can be added lie side by side in a buffer."""
    for param, name in names.items():
        if param.layout is not torch.strided or param.is_quantized:
            found = "quantized" if param.is_quantized else f"of the layout {param.layout}"
            raise ConfigError(
                f"parameter {name} is {found}, and cannot be trained in buckets; leave it out of "
                "the optimizer, or keep it dense",
                code="tensor-not-served",
            )


def refuse_renormed(names: Mapping[nn.Parameter, str], model: nn.Module) -> None:
    """Each rank would scale the rows of its own samples, and replicas part."""
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or module.max_norm is None:
            continue
        if any(param in names for param in module.parameters(recurse=False)):
            raise ConfigError(
                f"module {name or 'of the model'} has max_norm={module.max_norm}: in each forward "
                "it scales rows of its weight, on each rank those of its own samples; leave "
                "max_norm out, and scale the rows on every rank after step(), as by "
                "weight.data.copy_(weight.data.renorm(2, 0, max_norm))",
                code="module-not-served",
            )


def refuse_alone_in_their_group(model: nn.Module) -> None:
    """Torch's synchronised batch normalisation, without a word, is an ordinary one where torch's
    own process group is not there. With one of several ranks it does as its script has asked.
    """
    if distributed.is_available() and distributed.is_initialized():
        if distributed.get_world_size() > 1:
            return
        found = "torch.distributed has one rank"
    else:
        found = "torch.distributed is not initialized"
    for name, module in model.named_modules():
        # Where dearmpi runs a script, torch's name has come to mean the other one.
        if isinstance(module, nn.SyncBatchNorm) and not isinstance(module, SyncBatchNorm):
            raise ConfigError(
                f"module {name or 'of the model'} is torch's SyncBatchNorm, which would normalise "
                f"each rank's samples by themselves, as {found}; call model = "
                "dearmpi.convert_sync_batchnorm(model) before the DistributedOptimizer is made",
                code="module-not-served",
            )


def refuse_unaveraged(buffers: Iterable[tuple[str, Tensor]], how: Buffers) -> None:
    """Raise ConfigError for a buffer that ``how`` averages in a format that nobody can add, such as
    float8.
    """
    for name, buffer in buffers if how == "average" else ():
        if buffer.is_floating_point() and buffer.dtype not in _ADDED:
            raise ConfigError(
                f"buffers is 'average', but buffer {name} is of {buffer.dtype}, which cannot be "
                "added up; use buffers='broadcast' or 'keep', or keep the buffer in bfloat16",
                code="buffer-not-averaged",
            )


def check_apart(params: Container[nn.Parameter], model: nn.Module) -> None:
    """Raise ConfigError if one of ``params`` shares memory with another parameter or buffer of
    ``model``: a read of the other would not wait, and where parameters are moved into buckets it
    would no longer follow. Waits for no gathers: where parameters lie is known.
    """
    end, before, is_own_before = 0, "", False
    for start, stop, name, is_own in sorted(_spans(params, model)):
        if start < end and (is_own or is_own_before):
            raise ConfigError(
                f"{before} and {name} share memory without being one parameter, so that a step on "
                "one of them would not be seen through the other; make them one Parameter "
                "(model.a.weight = model.b.weight), or give one a copy of the data (.clone())",
                code="parameters-share-memory",
            )
        if stop > end:
            end, before, is_own_before = stop, name, is_own


def check_private(params: Mapping[nn.Parameter, str]) -> None:
    """Raise ConfigError for memory that other processes see: parameters would move out of it."""
    for param, name in params.items():
        if param.device.type == "cpu" and param.is_shared():
            raise ConfigError(
                f"parameter {name} is in memory that is shared with other processes "
                "(share_memory()) or mapped from a file. They would no longer see it, as it moves "
                "into a bucket; use gather='gradients', which leaves parameters where they are, or "
                "give the model memory of its own (param.data = param.data.clone())",
                code="parameters-share-memory",
            )


def _spans(
    params: Container[nn.Parameter], model: nn.Module
) -> Iterator[tuple[int, int, str, bool]]:
    """First and one-past-last address of each tensor, its name, and whether it is of ``params``;
    not of those with gaps, in which others may lie, nor of sparse ones and those without a shape.
    """
    for _, name, tensor in model_tensors(model):
        if is_lazy(tensor) or tensor.layout is not torch.strided:
            continue
        dims = zip(tensor.shape, tensor.stride(), strict=True) if tensor.numel() else ()
        extent = 1 + sum((size - 1) * stride for size, stride in dims)
        if tensor.data_ptr() and extent == tensor.numel():
            start = tensor.data_ptr()
            yield start, start + tensor.nbytes, name, tensor in params


LEAVE_OUT = (
    "leave it out and call the module itself, since the DistributedOptimizer averages gradients "
    "over all ranks"
)
_SHARDED = (
    "leave it out, since the DistributedOptimizer averages gradients over all ranks, and with "
    "gather='parameters' it shards the optimizer's state"
)
REPLICATED = "was given to replicate(), which averages gradients"
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
            module = f"module {name} of the model" if name else "the model"
            raise ConfigError(f"{module} {what}; {cure}", code="wrapped-model")
    for _, name, tensor in model_tensors(model):
        kind = _sharded_kind(tensor)
        if kind:
            raise ConfigError(
                f"parameter or buffer {name} is {kind}, of which each rank holds a part; "
                f"{_SHARDED}, and pass the module as it was before",
                code="parameter-sharded",
            )


def refuse_optimizer_wrappers(optimizer: Optimizer) -> None:
    """Raise ConfigError for an optimizer that shares its work with other ranks."""
    if _is_of(optimizer, "dearmpi.engine.facade", "Facade"):
        raise ConfigError(
            f"optimizer is a {type(optimizer).__name__} already, which averages by itself; pass "
            "the optimizer of torch that it was made of",
            code="wrapped-optimizer",
        )
    for name, what in _SHARING_OPTIMIZERS.items():
        if _is_of(optimizer, "torch.distributed.optim", name):
            raise ConfigError(
                f"optimizer is a {name}, which {what}; leave it out, and pass the optimizer that "
                "it was made with or of, such as torch.optim.AdamW(model.parameters())",
                code="wrapped-optimizer",
            )
    kind = type(optimizer)
    if kind.__module__.startswith("torch.distributed."):
        raise ConfigError(
            f"optimizer is a {kind.__name__} of torch.distributed, which expects torch to average "
            "gradients or to shard parameters; pass an optimizer of torch.optim, such as "
            "torch.optim.AdamW(model.parameters())",
            code="wrapped-optimizer",
        )


def refuse_outer_optimizers() -> None:
    """Raise UsageError if torch's PostLocalSGDOptimizer takes the step that is about to begin."""
    home = "torch.distributed.optim.post_localSGD_optimizer"
    if home in sys.modules and is_called_from(home):
        raise UsageError(
            "a PostLocalSGDOptimizer steps this DistributedOptimizer and averages parameters, some "
            "of which are still under way; leave it out, since gradients are averaged in each step",
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
            return REPLICATED, LEAVE_OUT
        return "was given to fully_shard() (FSDP), which shards its parameters", _SHARDED
    if "replicate" in composed_apis(module):
        return REPLICATED, LEAVE_OUT
    return None


def refuse_sharded(name: str, param: Tensor | None) -> None:
    """Raise UsageError if ``param`` is sharded, which takes the place of parameter ``name``, or for
    None, if FullyShardedDataParallel takes parameter ``name`` away.
    """
    kind = None
    if param is not None:
        kind = _sharded_kind(param)
    elif is_called_from("torch.distributed.fsdp"):
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


def is_called_from(package: str) -> bool:
    """Whether a function of ``package`` is among the nearest callers."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return False
        if str(frame.f_globals.get("__name__", "")).startswith(package):
            return True
        frame = frame.f_back
    return False


class WrapperWatch:
    """Whether a wrapper may be around the parameters of one model, whose optimizer is made already.

    Modules are called often, so they look for wrappers only where ``is_on``. A wrapper reads all
    parameters of a module when it is made, and needs torch.distributed.

    is_on: False as long as there can be no wrapper.
    """

    __slots__ = ("is_on",)

    def __init__(self) -> None:
        self.is_on = _is_distributed()

    def parameters_read(self) -> None:
        """All parameters of some module are read."""
        if not self.is_on:  # replicate() may come before torch.distributed begins
            self.is_on = _is_distributed() or (
                COMPOSABLE in sys.modules and is_called_from(COMPOSABLE)
            )


def _is_distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized()


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
                f"its DistributedOptimizer averages too; {LEAVE_OUT}",
                code="wrapped-model",
            )


def refuse_replicated(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Raise UsageError if one of ``modules``, each with its name in the model, was given to
    replicate() after the optimizer was made.

    Its hook runs after the optimizer's, so the wrapper is not active yet when that one looks.
    """
    if not _is_distributed():
        return
    for name, module in modules:
        if "replicate" in composed_apis(module):
            raise UsageError(
                f"module {name or 'of the model'} {REPLICATED}; {LEAVE_OUT}", code="wrapped-model"
            )
