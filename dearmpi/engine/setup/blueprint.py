"""Blueprint: what an optimizer's engine is built by, agreed upon by all ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import nn
from torch.optim import Optimizer

from dearmpi.comm.world import World
from dearmpi.config import EngineConfig
from dearmpi.engine.device.device import device_of
from dearmpi.engine.device.device_way import check_devices
from dearmpi.engine.iteration.compilation import refuse_compiled
from dearmpi.engine.model.aliasing import check_apart, check_private
from dearmpi.engine.model.unserved import (
    refuse_alone_in_their_group,
    refuse_layouts,
    refuse_lazy,
    refuse_renormed,
    refuse_unaveraged,
)
from dearmpi.engine.model.wrappers import refuse_optimizer_wrappers, refuse_wrappers
from dearmpi.engine.probe.probe import require_half, require_host
from dearmpi.engine.setup.comparison import check_alike
from dearmpi.engine.update.master import is_half
from dearmpi.errors import ConfigError
from dearmpi.plan.data.layout import BucketLayout, build_layout, fuse_by_cap, spec_of
from dearmpi.plan.data.plan import Plan
from dearmpi.plan.data.schedule import Schedule, build_schedule
from dearmpi.torch_internals import is_patched

NOT_KNOWN: Mapping[nn.Parameter, str] = MappingProxyType({})
"""Of no parameter anything is known."""

_ADDED = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)


@dataclass(frozen=True, slots=True)
class Blueprint:
    """Everything that is decided before anything is built.

    names: the parameters under the optimizer, in the model's order.
    config: with the window of the plan, if there is one.
    """

    names: Mapping[nn.Parameter, str]
    layout: BucketLayout
    schedule: Schedule
    config: EngineConfig


def check_arguments(optimizer: object, model: object, plan: object) -> None:
    """Raise ConfigError unless they are an optimizer and a model, in this order, and ``plan`` is
    not one that is to be made for a compiled model; scripts cannot be trained, nor parameters that
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


def draw_blueprint(
    optimizer: Optimizer,
    model: nn.Module,
    *,
    world: World,
    config: EngineConfig,
    plan: Plan | None = None,
    known: Mapping[nn.Parameter, str] = NOT_KNOWN,
) -> Blueprint:
    """Lay out and check, here and against the other ranks (collective). ``known``: as in
    ``optimized_parameters``.

    Raises ConfigError for parameters or an optimizer that cannot be served, MismatchError if the
    ranks' models, optimizers or settings differ.
    """
    names = optimized_parameters(optimizer, model, known)
    check_devices(world, names, config=config)
    layout = lay_out(names, model, world_size=world.size, config=config, plan=plan)
    if plan is not None:
        schedule, config = plan.schedule, replace(config, window=plan.window)
    else:
        schedule = build_schedule(config.schedule, len(layout))
    check_alike(world, optimizer, model, names, config=config, layout=layout, schedule=schedule)
    check_parameters(optimizer, names, config=config)
    refuse_unaveraged(model.named_buffers(), config.buffers)
    return Blueprint(names, layout, schedule, config)


def lay_out(
    names: Mapping[nn.Parameter, str],
    model: nn.Module,
    *,
    world_size: int,
    config: EngineConfig,
    plan: Plan | None = None,
) -> BucketLayout:
    """The buckets of a blueprint. Raises ConfigError for a plan that does not fit, for
    modules that would go wrong on several ranks, and for parameters that share memory, with each
    other or where they would move away from it.
    """
    if world_size > 1:
        refuse_renormed(names, model)
        refuse_alone_in_their_group(model)
    if config.has_buckets(world_size):
        refuse_wrappers(model)
        refuse_layouts(names)
        check_apart(names, model)
        if config.gather == "parameters":
            check_private(names)
    specs = [spec_of(param, name) for param, name in names.items()]
    if plan is not None:
        return plan.layout(specs, world_size)
    model_bytes = sum(spec.nbytes for spec in specs)
    cap_bytes = config.cap_bytes(model_bytes, world_size=world_size)
    return build_layout(fuse_by_cap(specs, cap_bytes), world_size)


def optimized_parameters(
    optimizer: Optimizer, model: nn.Module, known: Mapping[nn.Parameter, str] = NOT_KNOWN
) -> dict[nn.Parameter, str]:
    """The optimizer's parameters with their names, in the model's order; those without elements,
    of which nothing travels and no step changes anything, are left out.

    Who is ``known`` keeps the name, by which the state goes from one layout to another, whatever
    the model calls it by now; who is new, and called as one of these, gets another one.

    Raises ConfigError for parameters that are not in the model, or if none requires grad.
    """
    wanted = {param for group in optimizer.param_groups for param in group["params"]}
    if known.keys() == {param for param in wanted if param.numel()}:
        names = dict(known)  # not looked up, since that waits for the gathers
    else:
        names = _name(wanted, model, known)
    if not any(param.requires_grad for param in names):
        raise ConfigError(
            "the optimizer has no parameter that requires grad: nothing to train",
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
            "nn.ModuleList([a, b]))",
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


def check_parameters(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str], *, config: EngineConfig
) -> None:
    """Raise ConfigError for parameters on several devices, for settings of precision without
    effect, on one rank as well, and for parameters in a precision that the optimizer cannot update,
    or whose gradients cannot be sent.
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
    if config.update_on == "host":
        require_host(optimizer)
    elif not config.master_weights:
        require_half(optimizer, halves, whole=config.gather == "gradients")


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
    if config.reduce_scatter == "native" and param.dtype not in (torch.float32, torch.float64):
        raise ConfigError(
            f"reduce_scatter is 'native', but MPI cannot add gradients of {param.dtype}, such as "
            f"that of parameter {name}; use 'ring' or 'exchange'",
            code="dtype-not-served",
        )
    if param.grad_dtype != param.dtype:
        raise ConfigError(
            f"parameter {name} of {param.dtype} has the grad_dtype {param.grad_dtype}, but "
            "gradients are added and sent in the parameter's dtype; leave grad_dtype out, or keep "
            "the parameter in fp32 and compute under torch.autocast",
            code="dtype-not-served",
        )
