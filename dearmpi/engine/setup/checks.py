"""Checks of what a script gives: arguments, parameters and the optimizer, on one rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

import torch
from torch import nn
from torch.optim import Optimizer

from dearmpi.comm.world import World
from dearmpi.config import ADDED_BY_LIBRARY, EngineConfig
from dearmpi.device.accelerator import device_of
from dearmpi.device.route_choice import check_routes
from dearmpi.engine.iteration.compilation import refuse_compiled
from dearmpi.engine.probe.probe import require_half, require_host
from dearmpi.engine.sync.refused_models import (
    refuse_lazy,
    refuse_optimizer_wrappers,
    refuse_wrappers,
)
from dearmpi.engine.update.master import is_half
from dearmpi.errors import ConfigError
from dearmpi.torch_internals import is_patched

_ADDED = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)


def check_arguments(optimizer: object, model: object, plan: object) -> None:
    """Raise ConfigError unless they are an optimizer and a model, in this order. Nor may ``plan``
    be one that is to be made for a compiled model. Scripts cannot be trained, nor parameters that
    have no shape yet, nor steps be taken that a script has put on the instance.
    """
    kinds = (("optimizer", optimizer, Optimizer), ("model", model, nn.Module))
    for name, given, wanted in kinds:
        if not isinstance(given, wanted):
            raise ConfigError(
                f"{name} is of type {type(given).__name__}, not {wanted.__name__}; call "
                "DistributedOptimizer(optimizer, model) with an optimizer of torch and the model "
                "whose parameters it has",
                code="wrong-type",
            )
    assert isinstance(optimizer, Optimizer) and isinstance(model, nn.Module)
    refuse_optimizer_wrappers(optimizer)
    _refuse_patched(optimizer)
    _refuse_scripts(optimizer, model)
    refuse_lazy(model)
    if plan == "auto":
        refuse_compiled(model)


def _refuse_patched(optimizer: Optimizer) -> None:
    if is_patched(optimizer):
        raise ConfigError(
            f"the step of this {type(optimizer).__name__} was replaced on the instance, but updates"
            " call that of its class; override step() in a class of your own, or replace that of "
            "the DistributedOptimizer",
            code="optimizer-changed",
        )


def _refuse_scripts(optimizer: Optimizer, model: nn.Module) -> None:
    """A script that is trained would have to be hooked."""
    trained = {param for group in optimizer.param_groups for param in group["params"]}
    for name, module in model.named_modules():
        own = module.parameters(recurse=False)
        if isinstance(module, torch.jit.ScriptModule) and any(param in trained for param in own):
            raise ConfigError(
                f"module {name or 'of the model'} is a script, which takes no hooks; train the "
                "module that it was made from",
                code="module-not-served",
            )


def check_parameters(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str], *, config: EngineConfig
) -> None:
    """Raise ConfigError for parameters on several devices, and for settings of precision without
    effect, on one rank as well. Also for parameters in a precision that the optimizer cannot
    update, or whose gradients cannot be sent.
    """
    device_of(names)
    for param, name in names.items():
        _check_gradient(param, name, config)
    halves = {param.dtype for param in names if is_half(param)}
    if config.master_weights and not halves:
        raise ConfigError(
            "master_weights has no effect: no parameter of the optimizer is bf16 or fp16; convert "
            "the model first, or leave master_weights out",
            code="setting-without-effect",
        )
    if config.wire_dtype is not None and all(is_half(param) for param in names):
        raise ConfigError(
            f"comm_dtype {config.comm_dtype!r} has no effect: all parameters of the optimizer are "
            "of half precision and travel as they are; leave it out, or keep the parameters in "
            "fp32 and compute under torch.autocast",
            code="setting-without-effect",
        )
    if config.compress != "none" and device_of(names) is not None:
        raise ConfigError(
            f"compress is {config.compress!r}, but the parameters are on a device, from which "
            "nothing is compressed yet; use comm_dtype 'bf16', or leave compress out",
            code="settings-contradict",
        )
    if config.shards == "whole" and device_of(names) is not None:
        raise ConfigError(
            "shards is 'whole', but the parameters are on a device, where no rank owns tensors; "
            "leave shards out, with gather='gradients' for optimizers that need whole tensors",
            code="settings-contradict",
        )
    if config.update_on == "host":
        require_host(optimizer)
    elif not config.master_weights:
        is_whole = config.gather == "gradients" or config.shards == "whole"
        require_half(optimizer, halves, whole=is_whole)


def _check_gradient(param: nn.Parameter, name: str, config: EngineConfig) -> None:
    """Raise ConfigError if the gradient of ``param`` cannot be sent as it is."""
    if config.wire_dtype is not None and param.is_complex():
        raise ConfigError(
            f"comm_dtype {config.comm_dtype!r} cannot carry parameter {name} of {param.dtype}, "
            "which would lose its imaginary part; leave comm_dtype out",
            code="dtype-not-served",
        )
    if not param.requires_grad:
        return
    if param.dtype not in _ADDED:
        raise ConfigError(
            f"parameter {name} is of {param.dtype}, whose gradients cannot be added up; keep it in "
            "bfloat16 or float32 and convert it in the forward, or freeze it and leave it out of "
            "the optimizer",
            code="dtype-not-served",
        )
    by_library = config.reduce_scatter in ADDED_BY_LIBRARY
    if by_library and param.dtype not in (torch.float32, torch.float64):
        raise ConfigError(
            f"reduce_scatter is {config.reduce_scatter!r}, but MPI cannot add gradients of "
            f"{param.dtype}, such as that of parameter {name}; use 'ring' or 'exchange'",
            code="dtype-not-served",
        )
    grad_dtype = getattr(param, "grad_dtype", param.dtype)  # missing in older torch
    if grad_dtype != param.dtype:
        raise ConfigError(
            f"parameter {name} of {param.dtype} has the grad_dtype {grad_dtype}, but "
            "gradients are added and sent in the parameter's dtype; leave grad_dtype out, or keep "
            "the parameter in fp32 and compute under torch.autocast",
            code="dtype-not-served",
        )


def check_job(
    world: World, params: Collection[nn.Parameter], *, config: EngineConfig
) -> tuple[EngineConfig, str]:
    """``config``, with the grid of a topology's file in its place, and what for (collective).

    Raises ConfigError unless ``shards`` has a weight for each rank, if it has any, for topologies
    as ``settle_topology`` does, and for routes as ``check_routes`` does.
    """
    if config.has_weights and len(config.shards) != world.size:
        raise ConfigError(
            f"shards has {len(config.shards)} weights for {world.size} ranks; give one for each",
            code="settings-contradict",
        )
    return check_routes(world, params, config=config)


NOT_KNOWN: Mapping[nn.Parameter, str] = MappingProxyType({})
"""Of no parameter anything is known."""


def optimized_parameters(
    optimizer: Optimizer, model: nn.Module, known: Mapping[nn.Parameter, str] = NOT_KNOWN
) -> dict[nn.Parameter, str]:
    """The optimizer's parameters with their names, in the model's order; those without elements,
    of which nothing travels and no step changes anything, are left out.

    A ``known`` parameter keeps its name, by which the state goes from one layout to another,
    whatever the model calls it by now. A new one that is called as one of these gets another name.

    Raises ConfigError for parameters that are not in the model, or if none requires grad.
    """
    # In their order: an error has the same words on all ranks.
    wanted = dict.fromkeys(p for group in optimizer.param_groups for p in group["params"])
    if known.keys() == {param for param in wanted if param.numel()}:
        names = dict(known)  # not looked up, since that waits for the gathers
    else:
        names = _name(wanted, model, known)
    if not any(param.requires_grad for param in names):
        raise ConfigError(
            "the optimizer has no parameter that requires grad: nothing to train; set "
            "requires_grad before the optimizer is wrapped, or leave dearmpi out",
            code="nothing-to-train",
        )
    return names


def _name(
    wanted: Collection[nn.Parameter], model: nn.Module, known: Mapping[nn.Parameter, str]
) -> dict[nn.Parameter, str]:
    names = {param: name for name, param in model.named_parameters() if param in wanted}
    strangers = [tuple(param.shape) for param in wanted if param not in names]
    if strangers:
        refuse_wrappers(model)  # which may have put others in their place
        raise ConfigError(
            f"the optimizer has {len(strangers)} parameters that are not in the model, of shapes "
            f"{strangers[:3]}; pass the model that the optimizer was made for (several modules: "
            "nn.ModuleList([a, b])). Where the model has got other parameters since, as by "
            "to_empty() or load_state_dict(assign=True), make the optimizer after that",
            code="parameters-not-in-model",
        )
    taken = set(known.values())
    for param, name in names.items():
        if param not in known:
            while name in taken:
                name += "'"
            taken.add(name)
        names[param] = known.get(param, name)
    return {param: name for param, name in names.items() if param.numel()}
