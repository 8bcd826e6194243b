"""Methods of torch itself: DistributedDataParallel and fully_shard, with their options, over gloo
inside an MPI job.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dearmpi.bench.link import ADDRESS_CURE, root_address
from dearmpi.bench.method import (
    MOST_CAP_MB,
    Entrant,
    Setup,
    read_cap,
    read_flag,
    refuse_unknown,
)
from dearmpi.bench.process_memory import give_back_large, reuse_pages
from dearmpi.bench.replay import ReplayModel
from dearmpi.comm.world import World
from dearmpi.config import check_choice, engine_setting
from dearmpi.errors import ConfigError
from dearmpi.torch_internals import parameter_table
from dearmpi.train.ranks.agreement import together

# A rank that fails leaves the others waiting inside gloo for as long as this.
PATIENCE_S = 60.0
_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"


def join_group(world: World, *, patience_s: float = PATIENCE_S) -> None:
    """Initialise ``torch.distributed`` over the ranks of ``world`` (collective).

    Several hosts: rank 0 is found at MASTER_ADDR, else at the address of its host's name; gloo
    uses the interface GLOO_SOCKET_IFNAME, else that of each host's name.
    """
    patience = timedelta(seconds=patience_s)
    one_host = len(set(world.hosts)) == 1
    if one_host:
        os.environ.setdefault(_INTERFACE_VARIABLE, "lo")
    store: TCPStore | None = None
    address = ""
    with together(world, root_only=True):
        if world.is_root:
            address = root_address(one_host)
            store = _open_store(address, world.size, patience)
    place = world.broadcast_text(f"{address} {store.port if store else ''}").split()
    if store is None:
        store = TCPStore(place[0], int(place[1]), world.size, timeout=patience)
    dist.init_process_group(
        "gloo", store=store, rank=world.rank, world_size=world.size, timeout=patience
    )


def _open_store(address: str, size: int, patience: timedelta) -> TCPStore:
    try:
        return TCPStore(address, 0, size, is_master=True, timeout=patience, wait_for_workers=False)
    except (OSError, RuntimeError) as error:
        said = str(error).strip().splitlines()
        raise ConfigError(
            f"rank 0 cannot be reached at {address} ({said[0] if said else 'no reason'}); "
            f"{ADDRESS_CURE}",
            code="address-not-reached",
        ) from error


def leave_group(*others: object, failed: bool) -> None:
    """Take it down, if it is up.

    After a failure operations may be under way whose threads need Python's lock to end. Freeing the
    group would wait for them with the lock held. So the group, and ``others`` that refer to it, are
    then never freed; the other ranks' operations run into the time limit.
    """
    if not dist.is_initialized():
        return
    if failed:
        for kept in (dist.group.WORLD, *others):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    # Its last owner must be the one in Python, which lets go of the lock. A DDP model would wait
    # for the group's threads with the lock held, while one of them may need it to end an operation.
    group = dist.group.WORLD
    dist.destroy_process_group()
    gc.collect()  # models in cycles
    del group


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


def ddp_powersgd(setup: Setup) -> Entrant:
    """The same with torch's PowerSGD hook, with error feedback and a warm start.

    Options: ``rank`` of the approximation, 4; ``start``, the first step that is compressed, 2;
    ``cap``, all of the model: gloo finishes reductions of two buckets in any order, in which the
    hook begins the next ones, so that with several buckets it hangs.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    settings = read_ddp_powersgd(setup.options)
    state = powerSGD_hook.PowerSGDState(
        dist.group.WORLD,
        matrix_approximation_rank=settings.rank,
        start_powerSGD_iter=settings.start,
    )
    model = nn.parallel.DistributedDataParallel(setup.model, **settings.arguments)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return Entrant(model, setup.make_optimizer(model.parameters()))


def ddp_localsgd(setup: Setup) -> Entrant:
    """torch's PeriodicModelAverager: each rank trains alone, and parameters are averaged at times.

    Options: ``period``, steps from one average to the next, 8.
    """
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.algorithms.model_averaging.utils import average_parameters
    from torch.distributed.optim import PostLocalSGDOptimizer

    averager = PeriodicModelAverager(period=read_ddp_localsgd(setup.options), warmup_steps=0)
    params = list(setup.model.parameters())
    optimizer = PostLocalSGDOptimizer(setup.make_optimizer(params), averager)
    group = averager.process_group

    def finish() -> None:
        average_parameters(iter(params), group)

    return Entrant(setup.model, optimizer, finish=finish)


def read_ddp_localsgd(options: Mapping[str, str]) -> int:
    refuse_unknown(options, ("period",))
    return _read_number(options, "period", default=8, least=1)


def read_ddp(options: Mapping[str, str]) -> _DdpSettings:
    refuse_unknown(options, ("cap", "comm_dtype", "view"))
    comm_dtype = options.get("comm_dtype", "fp32")
    check_choice("comm_dtype", comm_dtype, engine_setting("comm_dtype").choices)
    view = read_flag(options, "view", default=False)
    arguments: dict[str, Any] = {"gradient_as_bucket_view": view}
    if "cap" in options:
        arguments["bucket_cap_mb"] = read_cap(options["cap"])
    return _DdpSettings(arguments, comm_dtype)


@dataclass(frozen=True, slots=True)
class _PowerSgdSettings:
    """arguments: of the wrapper. rank, start: as in ``ddp_powersgd``."""

    arguments: dict[str, Any]
    rank: int
    start: int


def read_ddp_powersgd(options: Mapping[str, str]) -> _PowerSgdSettings:
    refuse_unknown(options, ("cap", "rank", "start", "view"))
    rest = {"cap": f"{MOST_CAP_MB}"}
    rest |= {name: value for name, value in options.items() if name in ("cap", "view")}
    rank = _read_number(options, "rank", default=4, least=1)
    start = _read_number(options, "start", default=2, least=2)  # torch's least with a warm start
    return _PowerSgdSettings(read_ddp(rest).arguments, rank, start)


def _read_number(options: Mapping[str, str], name: str, *, default: int, least: int) -> int:
    text = options.get(name, str(default))
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(
            f"{name} is {text!r}; it must be a whole number, {least} or more",
            code="malformed-value",
        )
    return int(text)


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
