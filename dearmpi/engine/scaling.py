"""Clipping and scaling: what is done to all gradients between backprop and the step."""

from __future__ import annotations

import math
import warnings
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.optim import Optimizer

from dearmpi.comm.world import World
from dearmpi.engine.facade import Facade
from dearmpi.engine.iteration.compilation import untraced
from dearmpi.engine.iteration.engine import Engine
from dearmpi.engine.iteration.null_engine import NullEngine
from dearmpi.errors import ConfigError

# It may be meant, where losses take turns; but as a norm that is logged it would mislead.
_NO_GRADIENTS = (
    "the norm of no gradients is 0: on no rank has a backward given a parameter of this optimizer "
    "one since the last step(), which uses them up; to clip, or to know the norm, call "
    "clip_grad_norm_() between backward and step()"
)


def clip(
    engine: Engine | NullEngine, world: World, name: str, max_norm: float, norm_type: float
) -> float:
    """Scale all gradients so that their norm is at most ``max_norm``; the norm before (collective).

    name: the optimizer's. Raises MismatchError if the numbers differ between ranks.
    Where no rank has a gradient, that is 0, as in torch, and rank 0 warns. Raises ConfigError for a
    ``max_norm`` or ``norm_type`` that is not above 0, or no number.
    """
    max_norm, norm_type = _positive("max_norm", max_norm), _positive("norm_type", norm_type)
    with _named_clip(world, name, max_norm, norm_type):
        engine.wait_reduced()  # which may exchange something first
        engine.joining.announce_clip(max_norm, norm_type)
        return _clip(engine, world, max_norm, norm_type)


def _named_clip(
    world: World, name: str, max_norm: float, norm_type: float
) -> AbstractContextManager[None]:
    # Ranks compare names of calls. Each rank scales a shard of the gradients, so other numbers
    # would be wrong ones, the same on every rank.
    return world.named_call(f"{name}.clip_grad_norm_({max_norm}, norm_type={norm_type})")


def _positive(name: str, given: object) -> float:
    """As a number what torch takes for one: text and tensors too."""
    try:
        number = float(given)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(
            f"{name} is of type {type(given).__name__} and no number; call "
            "optimizer.clip_grad_norm_(max_norm, norm_type=2.0), which clips the gradients of all "
            "parameters of the optimizer",
            code="wrong-type",
        ) from None
    if not number > 0:
        raise ConfigError(f"{name} is {given}; it must be above 0", code="out-of-range")
    return number


def follow_clips(engine: Engine | NullEngine, world: World, name: str) -> None:
    """As an exhausted rank, clip as often as the others do before their step (collective)."""
    while (clipped := engine.next_clip()) is not None:
        with _named_clip(world, name, *clipped):
            _clip(engine, world, *clipped)


def _clip(engine: Engine | NullEngine, world: World, max_norm: float, norm_type: float) -> float:
    engine.wait_reduced(norm_type)
    unused = engine.find_unused()
    part, has_any = shard_norm(engine.shards(unused), norm_type), float(engine.has_gradients())
    if norm_type == math.inf:
        # Told apart, since what MPI takes for the largest of a number and NaN is nobody's promise.
        norm, is_nan, has_any = world.all_reduce(
            [0.0 if math.isnan(part) else part, math.isnan(part), has_any], "max"
        )
        norm = math.nan if is_nan else norm
    else:
        norm, has_any = world.all_reduce([part, has_any], "sum")
        norm = norm ** (1.0 / norm_type)
    if not has_any and world.is_root:
        warnings.warn(_NO_GRADIENTS, stacklevel=5)
    if not norm <= max_norm:
        engine.scale_gradients(max_norm / (norm + 1e-6), unused)
    return norm


def scale(engine: Engine | NullEngine, world: World, factor: float) -> bool:
    """Multiply all gradients by ``factor``; False if any was inf or NaN (collective)."""
    engine.joining.refuse("scaling gradients, which may skip a step,")
    engine.wait_reduced()
    found = [shard.isfinite().all() for shard in engine.shards()]
    is_finite = not found or bool(torch.stack(found).all())  # a device is waited for once
    engine.scale_gradients(factor)
    return world.all_reduce([float(is_finite)], "min")[0] > 0


def shard_norm(shards: list[Tensor], norm_type: float) -> float:
    """The sum of ``|x|**norm_type`` over all elements, or for ``inf`` the largest ``|x|``."""
    # A norm of halves may be beyond the range of halves.
    wide = [torch.promote_types(shard.dtype, torch.float32) for shard in shards]
    parts = [
        torch.linalg.vector_norm(shard, norm_type, dtype=dtype).double()
        for shard, dtype in zip(shards, wide, strict=True)
    ]
    if norm_type == math.inf:
        return float(torch.stack(parts).max()) if parts else 0.0  # NaN if there is one
    norms = torch.stack(parts).tolist() if parts else []  # a device is waited for once
    return float(sum(norm**norm_type for norm in norms))


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for a ``DistributedOptimizer``; other optimizers work as before.

    Use it in the same way: ``scale(loss).backward()``, ``unscale_(optimizer)`` before clipping,
    ``step(optimizer)``, ``update()``. ``unscale_`` and ``step`` are collective: a gradient that is
    inf or NaN on one rank skips the step, and lowers the scale, on all.
    """

    @untraced
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        if not isinstance(optimizer, Facade):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if not allow_fp16 and any(
            param.dtype == torch.float16
            for group in optimizer.param_groups
            for param in group["params"]
        ):
            # As torch does: dividing in fp16 would lose what the scaling was for.
            raise ValueError(
                "gradients of fp16 parameters cannot be unscaled; keep the parameters in fp32 "
                "and compute under torch.autocast"
            )
        is_finite = optimizer.scale_gradients_(float(inv_scale))
        if optimizer.config.keeps_unsent:
            optimizer.follow_loss_scale(self.get_scale)
        found_inf.fill_(0.0 if is_finite else 1.0)
        return {found_inf.device: found_inf}
