"""Muon for a whole model: the matrices of hidden layers by Muon, all other parameters by AdamW.

As its authors use it: embeddings, the last layer, and what is no matrix, have other best steps (K.
Jordan and others, 2024). Both share one learning rate and weight decay, since Muon's steps are
scaled to the size of AdamW's (J. Liu and others, 2025), unless ``adjust_lr_fn`` says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dearmpi.engine.update.update import step_clone
from dearmpi.errors import TaskError

_SHARED = ("lr", "weight_decay")
_LIKE_ADAMW = "match_rms_adamw"


class MuonWithAdamW(Optimizer):
    """Updates each param group by the optimizer that its ``kind`` names, ``muon`` or ``adamw``.

    State and options are those of ``torch.optim.Muon`` and ``torch.optim.AdamW``.
    """

    def __init__(self, params: Sequence[dict[str, Any]], **options: Any) -> None:
        """``params``: groups with a ``kind``. ``options``: Muon's; AdamW has its learning rate and
        weight decay, and its own defaults.
        """
        matrix, vector = torch.zeros(1, 1), torch.zeros(1)
        muon = torch.optim.Muon([matrix], **{"adjust_lr_fn": _LIKE_ADAMW, **options})
        shared = {key: muon.defaults[key] for key in _SHARED}
        self._kinds: dict[str, Optimizer] = {
            "muon": muon,
            "adamw": torch.optim.AdamW([vector], **shared),
        }
        groups = [{**self._kinds[group["kind"]].defaults, **group} for group in params]
        super().__init__(groups, shared)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for kind, optimizer in self._kinds.items():
            groups = [group for group in self.param_groups if group["kind"] == kind]
            if any(param.grad is not None for group in groups for param in group["params"]):
                step_clone(optimizer, groups, self.state)
        return loss


def muon_groups(
    model: nn.Module, groups: Sequence[nn.Parameter | dict[str, Any]]
) -> list[dict[str, Any]]:
    """``groups``, of parameters of ``model`` or a list of them, each in two by ``kind``: hidden
    matrices, and the rest.

    Raises TaskError for a model without hidden matrices.
    """
    hidden = hidden_matrices(model)
    parted: list[dict[str, Any]] = []
    for group in _as_groups(groups):
        for kind, is_hidden in (("muon", True), ("adamw", False)):
            members = [param for param in group["params"] if (id(param) in hidden) == is_hidden]
            if members:
                parted.append({**group, "params": members, "kind": kind})
    if not any(group["kind"] == "muon" for group in parted):
        raise TaskError(
            "optimizer Muon is for the matrices of hidden layers, and the model has none that are "
            "trained: embeddings, its last layer, filters and vectors are not among them; use "
            "AdamW",
            code="optimizer-not-built",
        )
    return parted


def hidden_matrices(model: nn.Module) -> set[int]:
    """The ids of the parameters with two dimensions, less those of embeddings and of the last
    linear layer, also where another layer shares them.
    """
    modules = list(model.modules())
    linear = [module.weight for module in modules if isinstance(module, nn.Linear)]
    left_out = {
        id(module.weight)
        for module in modules
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    left_out |= {id(weight) for weight in linear[-1:]}
    matrices = {id(param) for param in model.parameters() if param.dim() == 2}
    return matrices - left_out


def _as_groups(groups: Sequence[nn.Parameter | dict[str, Any]]) -> list[Mapping[str, Any]]:
    if groups and isinstance(groups[0], Mapping):
        return [group for group in groups if isinstance(group, Mapping)]
    return [{"params": list(groups)}]
