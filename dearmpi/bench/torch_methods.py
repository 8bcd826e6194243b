"""Methods of torch itself: DistributedDataParallel and fully_shard, with their options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from dearmpi.bench.method import (
    Entrant,
    Setup,
    read_cap,
    read_flag,
    refuse_unknown,
)
from dearmpi.bench.process_memory import give_back_large, reuse_pages
from dearmpi.bench.replay import ReplayModel
from dearmpi.config import check_choice, engine_setting
from dearmpi.errors import ConfigError
from dearmpi.torch_internals import parameter_table


@dataclass(frozen=True, slots=True)
class _DdpSettings:
    """arguments: of the wrapper. comm_dtype: in what a hook sends gradients."""

    arguments: dict[str, Any]
    comm_dtype: str


def ddp(setup: Setup) -> Entrant:
    """torch's DistributedDataParallel.

    Options: ``cap``, in MiB; ``comm_dtype``, by a hook; ``view=true``, gradients as views into the
    buckets, which else are copied back out of them.
    """
    return _enter_ddp(setup, read_ddp(setup.options))


def ddp_bf16(setup: Setup) -> Entrant:
    """The same with gradients compressed to bfloat16 on the wire."""
    return _enter_ddp(setup, read_ddp_bf16(setup.options))


def read_ddp(options: Mapping[str, str]) -> _DdpSettings:
    refuse_unknown(options, ("cap", "comm_dtype", "view"))
    comm_dtype = options.get("comm_dtype", "fp32")
    check_choice("comm_dtype", comm_dtype, engine_setting("comm_dtype").choices)
    view = read_flag(options, "view", default=False)
    arguments: dict[str, Any] = {"gradient_as_bucket_view": view}
    if "cap" in options:
        arguments["bucket_cap_mb"] = read_cap(options["cap"])
    return _DdpSettings(arguments, comm_dtype)


def read_ddp_bf16(options: Mapping[str, str]) -> _DdpSettings:
    if options.get("comm_dtype", "bf16") != "bf16":
        raise ConfigError(
            "ddp-bf16 sends bf16; take ddp with another comm_dtype", code="method-misfit"
        )
    return read_ddp({**options, "comm_dtype": "bf16"})


def _enter_ddp(setup: Setup, settings: _DdpSettings) -> Entrant:
    model = nn.parallel.DistributedDataParallel(setup.model, **settings.arguments)
    _compress(model, settings.comm_dtype)
    return Entrant(model, setup.make_optimizer(model.parameters()))


def _compress(model: nn.parallel.DistributedDataParallel, comm_dtype: str) -> None:
    """Have gradients sent as ``comm_dtype``; fp32: as they are."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if comm_dtype == "fp32":
        return
    hooks = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
    # torch refuses its own hook by name where there is no NCCL, although gloo adds bfloat16 too.
    group, hook = dist.group.WORLD, hooks[comm_dtype]
    assert group is not None
    model.register_comm_hook(None, lambda _, bucket: hook(group, bucket))


@dataclass(frozen=True, slots=True)
class _Fsdp2Settings:
    """reshards: whether blocks free parameters after feed-forward, and gather them for backprop.

    reuses_pages: whether the heap keeps large tensors that were freed.
    """

    reshards: bool
    reuses_pages: bool


def fsdp2(setup: Setup) -> Entrant:
    """torch's fully_shard: one unit per block of layers, the rest of the model around them.

    Options: ``reshard=false`` keeps the gathered parameters for backprop, instead of gathering them
    again. ``reuse_pages=false`` gives large tensors back to the system, which costs time, for
    models that do not fit otherwise: what is gathered and freed in turn leaves holes in the heap.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    check_fsdp2(setup)
    settings = read_fsdp2(setup.options)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks_of(setup.model):
        fully_shard(block, mesh=mesh, reshard_after_forward=settings.reshards)
    fully_shard(setup.model, mesh=mesh)  # what is left is needed first in backprop: never freed
    optimizer = setup.make_optimizer(setup.model.parameters())
    if settings.reuses_pages:
        return Entrant(setup.model, optimizer)
    give_back_large()
    return Entrant(setup.model, optimizer, close=reuse_pages)


def read_fsdp2(options: Mapping[str, str]) -> _Fsdp2Settings:
    refuse_unknown(options, ("reshard", "reuse_pages"))
    return _Fsdp2Settings(
        reshards=read_flag(options, "reshard", default=True),
        reuses_pages=read_flag(options, "reuse_pages", default=True),
    )


def check_fsdp2(setup: Setup) -> None:
    if "reuse_pages" in setup.options and not isinstance(setup.model, ReplayModel):
        raise ConfigError(
            "reuse_pages has an effect on replayed models only; leave it out",
            code="setting-without-effect",
        )


def blocks_of(model: nn.Module) -> list[list[nn.Module]]:
    """Leaf modules with parameters, by block, in their order.

    A block is a numbered part of the model, such as ``layer1.0``, else a leaf's parent. Modules
    that share a parameter with another stay out, as they must for ``fully_shard``.
    """
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for param in parameter_table(module).values():
            if param is not None:
                owners.setdefault(param, []).append(module)
    tied = {module for sharers in owners.values() if len(sharers) > 1 for module in sharers}
    blocks: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        if next(module.children(), None) is None and parameter_table(module) and module not in tied:
            blocks.setdefault(block_name(name), []).append(module)
    return list(blocks.values())


def block_name(leaf: str) -> str:
    """``layer1.0.conv1`` is in block ``layer1.0``; without a number it is the leaf's parent."""
    numbered = re.match(r"(.*?\.\d+)\.", leaf)
    return numbered[1] if numbered else leaf.rpartition(".")[0] or leaf
