"""Small models with what real ones have: tied weights, branches, recurrence, attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

NUM_FEATURES = 12


class Model(nn.Module):
    """``forward(inputs, flags)`` is the sum of the samples' losses; ``flags`` chooses a branch."""

    dtype = torch.float64

    def forward(self, inputs: Tensor, flags: Tensor) -> Tensor:
        raise NotImplementedError


def squared_error(outputs: Tensor) -> Tensor:
    """The sum of squared distances from an arbitrary target."""
    return (outputs - 0.3).square().sum()


class Dense(Model):
    """Layers of unequal sizes, and a scalar parameter used by the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(NUM_FEATURES, 7),
            nn.Tanh(),
            nn.Linear(7, 13),
            nn.Tanh(),
            nn.Linear(13, 3),
        )
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, inputs: Tensor, flags: Tensor) -> Tensor:
        return squared_error(self.layers(inputs) * self.scale)


class SinglePrecision(Dense):
    """The same in fp32."""

    dtype = torch.float32


class MixedPrecision(Dense):
    """Some layers in fp32, some in fp64: no bucket may hold both."""

    def forward(self, inputs: Tensor, flags: Tensor) -> Tensor:
        hidden = self.layers[:2](inputs)
        hidden = self.layers[2](hidden.float()).double()
        return squared_error(self.layers[3:](hidden) * self.scale)


class Matrices(Model):
    """Only matrices, for optimizers that take nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, 6, bias=False)
        self.second = nn.Linear(6, 5, bias=False)

    def forward(self, inputs: Tensor, flags: Tensor) -> Tensor:
        return squared_error(self.second(self.first(inputs).tanh()))


class Image(Model):
    """Convolutions in channels-last format."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 5, 2)
        self.second = nn.Conv2d(5, 4, 1)
        self.last = nn.Linear(4, 3)

    def forward(self, inputs: Tensor, flags: Tensor) -> Tensor:
        images = inputs.view(-1, 3, 2, 2).contiguous(memory_format=torch.channels_last)
        hidden = self.second(self.first(images).tanh()).flatten(1)
        return squared_error(self.last(hidden))


class Text(Model):
    """A tied embedding, attention (which never calls its ``out_proj``), and an LSTM.

    No bias in attention: the gradient of the keys' is zero but for rounding, which adaptive
    optimizers blow up.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.attention = nn.MultiheadAttention(4, 2, bias=False, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.recurrent = nn.LSTM(4, 4, batch_first=True)
        self.output = nn.Linear(4, 9, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, inputs: Tensor, flags: Tensor) -> Tensor:
        tokens = (inputs[:, :5] * 10).long().remainder(9)
        hidden = self.embedding(tokens)
        hidden = self.norm(hidden + self.attention(hidden, hidden, hidden)[0])
        hidden = self.recurrent(hidden)[0]
        return squared_error(self.output(hidden)) / 45


class Branches(Model):
    """A branch that only flagged samples take, one that none takes, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, 5)
        self.branch = nn.Linear(5, 5)
        self.never = nn.Linear(3, 3)
        self.frozen = nn.Linear(5, 5)
        self.last = nn.Linear(5, 3)
        self.frozen.requires_grad_(False)

    def forward(self, inputs: Tensor, flags: Tensor) -> Tensor:
        hidden = self.first(inputs).tanh()
        rows = flags.nonzero()[:, 0]
        if len(rows):
            hidden = hidden.index_add(0, rows, self.branch(hidden[rows]).tanh())
        return squared_error(self.last(self.frozen(hidden)))


MODELS: dict[str, Callable[[], Model]] = {
    "dense": Dense,
    "single": SinglePrecision,
    "mixed": MixedPrecision,
    "matrices": Matrices,
    "image": Image,
    "text": Text,
    "branches": Branches,
}


def build_model(name: str) -> Model:
    """The model called ``name``, the same at every call."""
    model = MODELS[name]().to(MODELS[name].dtype)  # type: ignore[attr-defined]
    fill(model)
    if name == "mixed":
        model.layers[2].float()  # type: ignore[index]
    if name == "image":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def fill(model: nn.Module) -> None:
    """Give parameters the same values at every call, whatever other threads draw meanwhile."""
    generator = torch.Generator().manual_seed(len(list(model.parameters())))
    with torch.no_grad():
        for param in model.parameters():
            values = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            param.copy_(0.4 * values)
