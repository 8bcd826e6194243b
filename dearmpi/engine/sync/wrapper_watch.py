"""Wrappers of torch that average gradients, put around a model whose optimizer is made already.

Each is refused in the first forward that goes through it. Modules are called often, so they look
for wrappers only once there may be one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from torch import distributed, nn

from dearmpi.engine.sync.model_tensors import model_tensors
from dearmpi.engine.sync.refused_models import LEAVE_OUT, REPLICATED, is_called_from
from dearmpi.errors import UsageError
from dearmpi.torch_internals import active_ddp, composed_apis

_COMPOSABLE = "torch.distributed._composable"  # imported by some frameworks, and seldom called


class WrapperWatch:
    """Whether a wrapper may be around the parameters of one model.

    It reads all parameters of a module when it is made, and needs torch.distributed.

    is_on: False as long as there can be no wrapper.
    """

    __slots__ = ("is_on",)

    def __init__(self) -> None:
        self.is_on = _is_distributed()

    def parameters_read(self) -> None:
        """All parameters of some module are read."""
        if not self.is_on:  # replicate() may come before torch.distributed begins
            self.is_on = _is_distributed() or (
                _COMPOSABLE in sys.modules and is_called_from(_COMPOSABLE)
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
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    for name, module in modules:
        if "replicate" in composed_apis(module):
            raise UsageError(
                f"module {name or 'of the model'} {REPLICATED}; {LEAVE_OUT}", code="wrapped-model"
            )
