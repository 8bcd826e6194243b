"""A small causal transformer: pre-norm blocks, rotary positions, GELU."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from dearmpi.errors import TaskError


@dataclass(frozen=True, slots=True)
class TransformerShape:
    """Sizes of a transformer.

    vocabulary: different tokens. context: most tokens it sees at once. width: numbers per token.
    depth: blocks. heads: attention heads, which share the width evenly.
    tied: output layer and embedding are one parameter.
    """

    vocabulary: int
    context: int
    width: int
    depth: int
    heads: int
    tied: bool = False

    def __post_init__(self) -> None:
        for name in ("vocabulary", "context", "width", "depth", "heads"):
            if getattr(self, name) < 1:
                raise TaskError(
                    f"{name} is {getattr(self, name)}; it must be at least 1", code="out-of-range"
                )
        if self.width % (2 * self.heads):
            raise TaskError(
                f"width {self.width} cannot be shared by {self.heads} heads in pairs of numbers; "
                f"it must be a multiple of {2 * self.heads}",
                code="out-of-range",
            )


class Attention(nn.Module):
    """Causal self-attention with rotary positions (Su et al., arXiv 2104.09864)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """x: (batch, length, width). rotation: (2, length, width / heads / 2)."""
        batch, length, width = x.shape
        split = self.inputs(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            rotate(query, rotation), rotate(key, rotation), value, is_causal=True
        )
        joined: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        return joined


class TransformerBlock(nn.Module):
    """Attention, then two linear layers, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.linear_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.contract = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """x: (batch, length, width), the same shape out."""
        x = x + self.attention(self.attention_norm(x), rotation)
        hidden = functional.gelu(self.expand(self.linear_norm(x)))
        added: Tensor = x + self.contract(hidden)
        return added


class Transformer(nn.Module):
    """Logits of the next token at every position."""

    rotation: Tensor

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(
            TransformerBlock(shape.width, shape.heads) for _ in range(shape.depth)
        )
        self.norm = nn.LayerNorm(shape.width)
        self.output = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.output.weight = self.embedding.weight
        angles = rotation_angles(shape.context, shape.width // shape.heads)
        self.register_buffer("rotation", angles, persistent=False)
        self._initialize()

    def _initialize(self) -> None:
        """Small normal weights; what is added to the residual stream shrinks with the depth."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            deviation = 0.5 / math.sqrt(parameter.shape[1])
            if name.endswith(("attention.output.weight", "contract.weight")):
                deviation /= math.sqrt(2 * self.shape.depth)
            nn.init.normal_(parameter, std=deviation)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: (batch, length), length at most the context; out: (batch, length, vocabulary)."""
        x = self.embedding(tokens)
        rotation = self.rotation[:, : tokens.shape[1]]
        for block in self.blocks:
            x = block(x, rotation)
        logits: Tensor = self.output(self.norm(x))
        return logits


def rotation_angles(length: int, head_width: int) -> Tensor:
    """Cosines and sines by which pairs of numbers turn: (2, length, head_width / 2)."""
    frequencies = 10000.0 ** (-torch.arange(0, head_width, 2) / head_width)
    angles = torch.outer(torch.arange(length), frequencies)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn each pair (first half, second half) of ``x`` by its position's angle."""
    cosine, sine = rotation
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cosine - right * sine, left * sine + right * cosine), dim=-1)


@torch.no_grad()
def generate(
    model: nn.Module, prompt: Tensor, *, length: int, context: int, temperature: float, seed: int
) -> Tensor:
    """Continue ``prompt`` (1-D, token numbers) by ``length`` tokens drawn from ``model``.

    The draw depends on ``seed`` alone, and leaves torch's own random state as it is.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = prompt.long()
    was_training = model.training
    model.eval()
    try:
        for _ in range(length):
            logits = model(tokens[-context:].unsqueeze(0))[0, -1].double()
            chances = torch.softmax(logits / temperature, dim=-1).cpu()
            drawn = torch.multinomial(chances, 1, generator=generator)
            tokens = torch.cat((tokens, drawn.to(tokens.device)))
    finally:
        model.train(was_training)
    return tokens
