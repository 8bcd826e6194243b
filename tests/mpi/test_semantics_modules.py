"""Ways in which modules and parameters are used, other than each layer once and in order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dearmpi.comm.world import World
from tests.mpi.models import NUM_FEATURES
from tests.mpi.semantics import SEMANTICS, assert_same_on_both_sides, script_of

pytestmark = SEMANTICS

WIDTH = 6


class Tied(nn.Module):
    """One weight in two modules, and transposed in a third place."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(NUM_FEATURES, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.inner.weight

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.again(self.inner(self.encode(inputs)).tanh()).tanh()
        return functional.linear(hidden, self.encode.weight.t())


class Borrower(nn.Module):
    """Uses a layer's parameters without ever calling it, and another's before its owner runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, WIDTH)
        self.never_called = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = functional.linear(inputs, self.first.weight) * self.last.bias
        hidden = functional.linear(hidden.tanh(), self.never_called.weight, self.never_called.bias)
        outputs: Tensor = self.last(self.first(inputs) + hidden)
        return outputs


class Attention(nn.Module):
    """Reads ``out_proj`` of its part without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, bias=False, batch_first=True)
        self.last = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = inputs.view(-1, 3, 4)
        outputs: Tensor = self.last(self.attention(tokens, tokens, tokens, need_weights=False)[0])
        return outputs


class Encoder(nn.Module):
    """Takes another path in evaluation than in training."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            4, 2, dim_feedforward=8, dropout=0.0, batch_first=True, bias=True
        )
        with torch.no_grad():  # the gradient of the keys' bias is zero but for rounding
            layer.self_attn.in_proj_bias.zero_()
        layer.self_attn.in_proj_bias.requires_grad_(False)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.encoder(inputs.view(-1, 3, 4))
        return outputs


class Recurrent(nn.Module):
    """Keeps its weights in a list of its own besides the module's table."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.recurrent = kind(4, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.last = nn.Linear(10, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.recurrent(inputs.view(-1, 3, 4))[0])
        return outputs


class OutOfOrder(nn.Module):
    """Registered in one order, called in another, one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, 3)
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Linear(NUM_FEATURES, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs).tanh()
        outputs: Tensor = self.last(self.twice(self.twice(hidden).tanh()).tanh())
        return outputs


class ChangingOrder(nn.Module):
    """Calls its layers in an order that depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, WIDTH)
        self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.count = 0

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.first(inputs)
        order = (0, 1, 2, 3) if self.count % 2 else (3, 1, 0, 2)
        self.count += self.training
        for place in order[: 4 - self.count % 3]:
            hidden = self.inner[place](hidden).tanh()
        return hidden


def test_weights_tied_across_modules(gather: str, world: World) -> None:
    assert_same_on_both_sides(script_of(Tied), world, gather=gather)


def test_a_parameter_used_by_a_module_that_does_not_own_it(gather: str, world: World) -> None:
    assert_same_on_both_sides(script_of(Borrower), world, gather=gather)


def test_multihead_attention(gather: str, world: World) -> None:
    assert_same_on_both_sides(script_of(Attention), world, gather=gather)


def test_transformer_encoder_in_training_and_in_evaluation(gather: str, world: World) -> None:
    assert_same_on_both_sides(script_of(Encoder), world, gather=gather)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers(kind: type[nn.LSTM] | type[nn.GRU], gather: str, world: World) -> None:
    assert_same_on_both_sides(script_of(lambda: Recurrent(kind)), world, gather=gather)


def test_modules_called_twice_and_in_another_order_than_registered(
    gather: str, world: World
) -> None:
    assert_same_on_both_sides(script_of(OutOfOrder), world, gather=gather)


def test_an_order_that_changes_between_iterations(gather: str, world: World) -> None:
    assert_same_on_both_sides(script_of(ChangingOrder), world, gather=gather)
