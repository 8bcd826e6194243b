"""bytes-lm: a byte-level transformer trained on real text.

The model is small and causal: pre-norm blocks, rotary positions, GELU.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from dearmpi.errors import DataError, TaskError
from dearmpi.train.tasks.task import Task, check_at_least, read_options
from dearmpi.train.tasks.text import (
    Corpus,
    bigram_entropy,
    read_corpus,
    standard_library_files,
    text_files,
)


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


NAME = "bytes-lm"
NUM_BYTES = 256


@dataclass(frozen=True, slots=True)
class BytesLMOptions:
    """Options of bytes-lm.

    data: files or folders to train on, separated as in PATH; none: the source of Python's
        standard library on this machine.
    max_bytes: most text that is read. eval_bytes: most that is held out, or one chunk of 4096
        bytes where that is more.
    context: bytes that the model sees at once. width, depth, heads, tied: see TransformerShape.
    prompt, sample_bytes: how the generated sample begins, and how many bytes follow.
    """

    data: str | None = None
    max_bytes: int = 8 * 1024 * 1024
    eval_bytes: int = 128 * 1024
    context: int = 64
    width: int = 96
    depth: int = 3
    heads: int = 3
    tied: bool = False
    prompt: str = "def "
    sample_bytes: int = 300

    def __post_init__(self) -> None:
        for name in ("max_bytes", "eval_bytes", "context"):
            check_at_least(NAME, name, getattr(self, name), 1)
        check_at_least(NAME, "sample_bytes", self.sample_bytes, 0)
        check_at_least(NAME, "length of prompt", len(self.prompt), 1)


class Windows:
    """Samples of ``context + 1`` bytes, each beginning where the one before has its last byte. So
    every byte but the first is predicted once.
    """

    def __init__(self, text: Tensor, context: int) -> None:
        self.text = text
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        return self.text[index * self.context : (index + 1) * self.context + 1]


def build_bytes_lm(options: Mapping[str, str]) -> Task:
    """The task; see BytesLMOptions. Raises TaskError for options, DataError for the text."""
    chosen = read_options(BytesLMOptions, options, task=NAME)
    corpus = _read(chosen)
    shape = TransformerShape(
        vocabulary=NUM_BYTES,
        context=chosen.context,
        width=chosen.width,
        depth=chosen.depth,
        heads=chosen.heads,
        tied=chosen.tied,
    )
    return Task(
        name=NAME,
        model=Transformer(shape),
        train_data=Windows(corpus.train, chosen.context),
        eval_data=Windows(corpus.held_out, chosen.context),
        loss=next_byte_loss,
        unit="tokens",
        units_per_sample=chosen.context,
        loss_scale_name="bits per byte",
        loss_scale=1 / math.log(2),
        notes=_notes(corpus, chosen),
        summarize=lambda model: _summarize(model, chosen),
        data_digest=corpus.digest,
        defaults={
            "optimizer": "AdamW",
            "optimizer_options": {"betas": (0.9, 0.99)},
            "lr": 5e-3,
            "batch_size": 16,
            "max_steps": 1800,
            "warmup_steps": 50,
            "weight_decay": 0.1,
            "lr_schedule": "cosine",
            "max_grad_norm": 1.0,
        },
    )


def next_byte_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross-entropy, in nats, of each byte given those before it; batch: (n, context + 1)."""
    tokens = batch.long()
    logits: Tensor = model(tokens[:, :-1])
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _read(options: BytesLMOptions) -> Corpus:
    if options.data is None:
        files = standard_library_files()
    else:
        parts = options.data.split(os.pathsep)
        if "" in parts:  # would be the current folder
            raise DataError(
                f"{options.data!r} has an empty path among {len(parts)}; give a path before "
                f"and after each {os.pathsep}",
                code="malformed-value",
            )
        files = text_files(map(Path, parts))
    return read_corpus(
        files,
        max_bytes=options.max_bytes,
        held_out_bytes=options.eval_bytes,
        min_chunk=options.context + 1,
    )


def _notes(corpus: Corpus, options: BytesLMOptions) -> list[str]:
    source = "Python's standard library" if options.data is None else options.data
    entropy = bigram_entropy(corpus.train, corpus.held_out)
    cut = (
        f"left out: what is above {options.max_bytes:,} bytes of text; "
        "--task-option max_bytes=N reads more"
    )
    return [
        f"text: {source}, {corpus.num_files} files, {len(corpus.train):,} bytes to train on, "
        f"{len(corpus.held_out):,} held out, digest {corpus.digest}",
        *([cut] if corpus.is_cut and options.data is not None else []),
        f"to beat: {entropy:.3f} bits per byte, the bigram entropy of the held-out text",
    ]


def _summarize(model: nn.Module, options: BytesLMOptions) -> Sequence[str]:
    device = next(model.parameters()).device
    tokens = generate(
        model,
        torch.tensor(list(options.prompt.encode()), device=device),
        length=options.sample_bytes,
        context=options.context,
        temperature=0.8,
        seed=0,
    )
    return ["sample:", *printable(bytes(tokens.tolist())).split("\n")]


def printable(text: bytes) -> str:
    """``text`` as it may be sent to a terminal: a control character there could be a command."""
    decoded = text.decode("utf-8", errors="replace")
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in decoded
    )
