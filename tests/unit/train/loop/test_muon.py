"""Muon in a run: hidden matrices by Muon, the rest by AdamW, as two optimizers of torch's do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dearmpi.errors import TaskError
from dearmpi.train.loop.optimizers import (
    MuonWithAdamW,
    choose_optimizer,
    hidden_matrices,
    muon_groups,
)
from dearmpi.train.settings.settings import RunSettings
from tests.codes import raises

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 has Muon")


class Language(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.attention = nn.MultiheadAttention(6, 2)
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.filters = nn.Conv1d(6, 6, 3)
        self.head = nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


HIDDEN = {"attention.in_proj_weight", "attention.out_proj.weight", "up.weight", "down.weight"}


@pytest.mark.parametrize("tied", [False, True])
def test_only_hidden_matrices_are_muons(tied: bool) -> None:
    model = Language(tied=tied)
    names = {id(param): name for name, param in model.named_parameters()}
    assert {names[key] for key in hidden_matrices(model)} == HIDDEN
    settings = RunSettings(optimizer="muon", lr=0.01, weight_decay=0.5, no_decay=("norms",))
    optimizer = choose_optimizer(settings).build_for(model, settings.no_decay)
    groups = [
        (group["kind"], group["weight_decay"], {names[id(param)] for param in group["params"]})
        for group in optimizer.param_groups
    ]
    rest = set(names.values()) - HIDDEN - {"norm.weight", "norm.bias"}
    assert groups == [
        ("muon", 0.5, HIDDEN),
        ("adamw", 0.5, rest),
        ("adamw", 0.0, {"norm.weight", "norm.bias"}),
    ]
    assert {group["lr"] for group in optimizer.param_groups} == {0.01}
    assert optimizer.param_groups[0]["adjust_lr_fn"] == "match_rms_adamw"


def test_a_model_without_hidden_matrices_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(4, 2))
    with raises(TaskError, "optimizer-not-built", "hidden layers"):
        muon_groups(model, list(model.parameters()))


def test_it_does_what_muon_and_adamw_do_apart() -> None:
    ends: list[dict[str, Any]] = []
    for together in (True, False):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 2)).double()
        groups = muon_groups(model, list(model.parameters()))
        optimizers: list[torch.optim.Optimizer]
        if together:
            optimizers = [MuonWithAdamW(groups, lr=0.02, weight_decay=0.1, momentum=0.9)]
        else:
            muon, adamw = (group["params"] for group in groups)
            optimizers = [
                torch.optim.Muon(
                    muon, lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"
                ),
                torch.optim.AdamW(adamw, lr=0.02, weight_decay=0.1),
            ]
        for step in range(4):
            inputs = torch.arange(12, dtype=torch.float64).view(3, 4) / (7 + step)
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(inputs).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        ends.append(dict(model.state_dict()))
    torch.testing.assert_close(ends[0], ends[1], rtol=0.0, atol=0.0)


def test_its_state_is_saved_and_loaded() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    made = [MuonWithAdamW(muon_groups(model, list(model.parameters()))) for _ in range(2)]
    model(torch.ones(2, 4)).sum().backward()
    loss = made[0].step(lambda: 3.0)
    made[1].load_state_dict(made[0].state_dict())
    entries = [set(state) for state in made[1].state.values()]
    assert loss == 3.0 and entries.count({"momentum_buffer"}) == 1
    assert entries.count({"step", "exp_avg", "exp_avg_sq"}) == 3
