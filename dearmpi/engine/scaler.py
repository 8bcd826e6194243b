"""Loss scaling for fp16, on gradients that are averaged over ranks and live in shards."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from dearmpi.engine.iteration.compilation import untraced
from dearmpi.engine.optimizer import DistributedOptimizer


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
        if not isinstance(optimizer, DistributedOptimizer):
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
        found_inf.fill_(0.0 if is_finite else 1.0)
        return {found_inf.device: found_inf}
