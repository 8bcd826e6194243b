"""Which modules of a model are its blocks, and what they keep for backprop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dearmpi.errors import TaskError
from dearmpi.train.loop.blocks import find_blocks, prepare_blocks
from dearmpi.train.settings.settings import RunSettings
from dearmpi.train.tasks.bytes_lm import Transformer, TransformerShape
from tests.codes import raises


def transformer() -> nn.Module:
    return Transformer(TransformerShape(vocabulary=16, context=8, width=8, depth=3, heads=2))


def stages() -> nn.Module:
    def stage() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)))

    return nn.Sequential(nn.Linear(2, 2), stage(), stage())


@pytest.mark.parametrize(("make", "number"), [(transformer, 3), (stages, 2)])
def test_blocks_are_the_outermost_that_repeat(make: Any, number: int) -> None:
    assert len(find_blocks(make())) == number


def test_layers_in_a_row_are_no_blocks() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU())
    with raises(TaskError, "setting-without-effect"):
        prepare_blocks(model, RunSettings(activation_checkpointing=True))


def test_backprop_keeps_the_inputs_of_blocks_alone() -> None:
    def kept(settings: RunSettings) -> tuple[int, Tensor]:
        torch.manual_seed(0)
        model, num_bytes = transformer(), 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal num_bytes
            num_bytes += tensor.nbytes
            return tensor

        prepare_blocks(model, settings)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(torch.zeros(2, 8, dtype=torch.long)).square().mean()
        torch.autograd.backward(loss)
        gradients = (parameter.grad for parameter in model.parameters())
        return num_bytes, torch.cat([g.flatten() for g in gradients if g is not None])

    whole, expected = kept(RunSettings())
    few, found = kept(RunSettings(activation_checkpointing=True))
    assert few < whole / 3
    assert torch.equal(found, expected)
