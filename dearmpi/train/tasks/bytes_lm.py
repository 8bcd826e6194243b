"""bytes-lm: a byte-level transformer trained on real text."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from dearmpi.errors import DataError
from dearmpi.train.tasks.task import Task, check_at_least, read_options
from dearmpi.train.tasks.text import (
    Corpus,
    bigram_entropy,
    read_corpus,
    standard_library_files,
    text_files,
)
from dearmpi.train.tasks.transformer import Transformer, TransformerShape, generate

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
    """Samples of ``context + 1`` bytes, each beginning where the one before has its last byte, so
    that every byte but the first is predicted once.
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
