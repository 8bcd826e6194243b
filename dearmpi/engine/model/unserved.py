"""Modules that would go wrong beside an optimizer of several ranks are refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, distributed, nn
from torch.nn.parameter import is_lazy

from dearmpi.config import Buffers
from dearmpi.engine.model.model_tensors import model_tensors
from dearmpi.errors import ConfigError

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
        if isinstance(module, nn.SyncBatchNorm):
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
