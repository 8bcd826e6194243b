"""Peers: others' ways to train, as their documentation says to use them; torch's are here."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import torch.distributed as dist
from torch import nn

from dearmpi.bench.guests import HOROVOD_SENDS, deepspeed, horovod
from dearmpi.bench.memory import give_back_large, reuse_pages
from dearmpi.bench.method import (
    ALONE,
    BAYES,
    OURS,
    Entrant,
    Factory,
    Method,
    Setup,
    alone,
    ours,
    read_cap,
    read_config,
    read_options,
    refuse_unknown,
)
from dearmpi.bench.replay import ReplayModel
from dearmpi.bench.searched import bayes, refuse_cap
from dearmpi.config import CommDtype, check_choice
from dearmpi.errors import ConfigError


def ddp(setup: Setup) -> Entrant:
    """torch's DistributedDataParallel; options: ``cap``, in MiB, and ``comm_dtype``, by a hook."""
    refuse_unknown(setup.options, {"cap", "comm_dtype"})
    settings: dict[str, Any] = {}
    if "cap" in setup.options:
        settings["bucket_cap_mb"] = read_cap(setup.options["cap"])
    model = nn.parallel.DistributedDataParallel(setup.model, **settings)
    _compress(model, setup.options.get("comm_dtype", "fp32"))
    return Entrant(model, setup.make_optimizer(model.parameters()))


def ddp_bf16(setup: Setup) -> Entrant:
    """The same with gradients compressed to bfloat16 on the wire."""
    if setup.options.get("comm_dtype", "bf16") != "bf16":
        raise ConfigError("ddp-bf16 sends bf16; take ddp with another comm_dtype")
    return ddp(replace(setup, options={**setup.options, "comm_dtype": "bf16"}))


def _compress(model: nn.parallel.DistributedDataParallel, comm_dtype: str) -> None:
    """Have gradients sent as ``comm_dtype``; fp32: as they are."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    check_choice("comm_dtype", comm_dtype, get_args(CommDtype))
    if comm_dtype == "fp32":
        return
    hooks = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
    # torch refuses its own hook by name where there is no NCCL, although gloo adds bfloat16 too.
    group, hook = dist.group.WORLD, hooks[comm_dtype]
    assert group is not None
    model.register_comm_hook(None, lambda _, bucket: hook(group, bucket))


def fsdp2(setup: Setup) -> Entrant:
    """torch's fully_shard: one unit per block of layers, the rest of the model around them.

    Option: ``reuse_pages=false`` gives large tensors back to the system, which costs time, for
    models that do not fit otherwise: what is gathered and freed in turn leaves holes in the heap.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    refuse_unknown(setup.options, {"reuse_pages"})
    gives_back = _gives_back(setup)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks_of(setup.model):
        fully_shard(block, mesh=mesh)
    fully_shard(setup.model, mesh=mesh)
    optimizer = setup.make_optimizer(setup.model.parameters())
    if gives_back:
        give_back_large()
        return Entrant(setup.model, optimizer, close=reuse_pages)
    return Entrant(setup.model, optimizer)


def _gives_back(setup: Setup) -> bool:
    asked = setup.options.get("reuse_pages")
    if asked is None:
        return False
    check_choice("reuse_pages", asked, ("true", "false"))
    if not isinstance(setup.model, ReplayModel):
        raise ConfigError("reuse_pages has an effect on replayed models only; leave it out")
    return asked == "false"


def blocks_of(model: nn.Module) -> list[list[nn.Module]]:
    """Leaf modules with parameters, by block, in their order.

    A block is a numbered part of the model, such as ``layer1.0``, else a leaf's parent. Modules
    that share a parameter with another stay out, as they must for ``fully_shard``.
    """
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                owners.setdefault(param, []).append(module)
    tied = {module for sharers in owners.values() if len(sharers) > 1 for module in sharers}
    blocks: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        if next(module.children(), None) is None and module._parameters and module not in tied:
            blocks.setdefault(block_name(name), []).append(module)
    return list(blocks.values())


def block_name(leaf: str) -> str:
    """``layer1.0.conv1`` is in block ``layer1.0``; without a number it is the leaf's parent."""
    numbered = re.match(r"(.*?\.\d+)\.", leaf)
    return numbered[1] if numbered else leaf.rpartition(".")[0] or leaf


_OVER_GLOO: Mapping[str, Factory] = {
    "ddp": ddp,
    "ddp-bf16": ddp_bf16,
    "fsdp2": fsdp2,
    "deepspeed": deepspeed,
}
_PEERS: Mapping[str, Factory] = {**_OVER_GLOO, "horovod": horovod}
METHOD_NAMES = (ALONE, *OURS, *_PEERS)
# In what a method can be asked to send; those that are not named: in anything.
_SENDS: Mapping[str, tuple[str, ...]] = {
    "ddp-bf16": ("fp32", "bf16"),
    "fsdp2": ("fp32",),
    "horovod": HOROVOD_SENDS,
}


def read_method(text: str, *, comm_dtype: CommDtype = "fp32") -> Method:
    """The method ``NAME[:CAP_MB][:OPTION=VALUE...]``, NAME one of METHOD_NAMES.

    comm_dtype: in what it is to send, unless its own options say. Raises ConfigError for any other
    name, and for a method that cannot.
    """
    name, *parts = text.split(":")
    if name == ALONE:
        factory: Factory = alone
    elif name in OURS:
        factory = bayes if name == BAYES else ours(name)
    elif name in _PEERS:
        factory = _PEERS[name]
    else:
        raise ConfigError(
            f"there is no method {name!r}; choose from {', '.join(METHOD_NAMES)}, or give your own "
            "with --method module:factory"
        )
    options = {**_asked(comm_dtype), **read_options(parts, label=text)}
    sent = options.get("comm_dtype", "fp32")
    if name != ALONE and sent == comm_dtype and sent not in _SENDS.get(name, get_args(CommDtype)):
        raise ConfigError(
            f"method {name} cannot send as {comm_dtype}; leave it out, or give comm_dtype to the "
            f"others one by one, as in dear:comm_dtype={comm_dtype}"
        )
    if name in OURS:
        read_config(options)
    if name == ALONE and parts:
        raise ConfigError(f"method {text!r}: alone has no options, since it sends nothing")
    if name == BAYES:
        refuse_cap(options)
    return Method(text, factory, options, uses_group=name in _OVER_GLOO, waits_in_mpi=name in OURS)


def plug_in(text: str, *, comm_dtype: CommDtype = "fp32") -> Method:
    """The method of ``module:factory``, which is imported when it enters, on every rank; the
    working folder is searched first.

    The factory takes a ``Setup`` and returns an ``Entrant``; ``torch.distributed`` is initialised.
    ``comm_dtype`` is among the setup's options, unless it is fp32.
    """
    module, colon, attribute = text.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(f"--method {text!r} is not of the form module:factory")

    def enter(setup: Setup) -> Entrant:
        entry = str(Path.cwd())
        sys.path.insert(0, entry)
        try:
            factory: Factory = getattr(import_module(module), attribute)
            return factory(setup)
        finally:
            sys.path.remove(entry)

    return Method(text, enter, _asked(comm_dtype))


def _asked(comm_dtype: CommDtype) -> dict[str, str]:
    return {} if comm_dtype == "fp32" else {"comm_dtype": comm_dtype}
