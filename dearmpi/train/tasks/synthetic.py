"""synthetic:NAME: well-known models on random inputs, to measure throughput."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dearmpi.train.tasks.image_models import ImageShape, build_vision_model, classification_loss
from dearmpi.train.tasks.task import (
    SYNTHETIC,
    Samples,
    Task,
    check_at_least,
    check_task_name,
    import_extra,
    read_options,
)

NUM_IMAGE_CLASSES = 1000
NUM_DISTINCT = 32

# Hidden size, layers, heads, as published (Devlin et al., arXiv 1810.04805).
_BERT_SIZES = {"bert-base": (768, 12, 12), "bert-large": (1024, 24, 16)}


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """Options of synthetic images. samples: length of an epoch. image_size: pixels per side."""

    samples: int = 1024
    image_size: int = 224

    def __post_init__(self) -> None:
        check_at_least(SYNTHETIC, "samples", self.samples, 1)
        check_at_least(SYNTHETIC, "image_size", self.image_size, 8)


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Options of synthetic text. samples: length of an epoch. seq_len: tokens per sample."""

    samples: int = 1024
    seq_len: int = 64

    def __post_init__(self) -> None:
        check_at_least(SYNTHETIC, "samples", self.samples, 1)
        check_at_least(SYNTHETIC, "seq_len", self.seq_len, 2)


@dataclass(frozen=True, slots=True)
class Repeated:
    """``length`` samples that go round a few distinct ones: making new ones would be measured."""

    distinct: list[Any]
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.distinct[index % len(self.distinct)]


def build_synthetic(name: str, options: Mapping[str, str]) -> Task:
    """The task ``synthetic:NAME``. NAME: ``bert-base``, ``bert-large``, ``resnet50``, or a model
    by its library, as ``torchvision:resnet50``, ``timm:NAME`` or ``transformers:vit``.

    Raises TaskError for an unknown name or option, and for a library that is not installed.
    """
    check_task_name(f"{SYNTHETIC}:{name}")
    if name in _BERT_SIZES:
        return _build_bert(name, options)
    if name == "resnet50":
        return _build_images(name, "transformers:resnet", options)
    return _build_images(name, name, options)


def _build_images(name: str, model_name: str, options: Mapping[str, str]) -> Task:
    task = f"{SYNTHETIC}:{name}"
    chosen = read_options(ImageOptions, options, task=task)
    shape = ImageShape(size=chosen.image_size, num_classes=NUM_IMAGE_CLASSES)
    model = build_vision_model(model_name, shape, needed_by=f"task {task}")
    generator = torch.Generator().manual_seed(0)
    size = (NUM_DISTINCT, 3, chosen.image_size, chosen.image_size)
    images = torch.randn(size, generator=generator)
    labels = torch.randint(NUM_IMAGE_CLASSES, (NUM_DISTINCT,), generator=generator)
    data = Repeated(list(zip(images, labels, strict=True)), chosen.samples)
    return _task(task, model, data, loss=classification_loss, unit="images", per_sample=1)


def _build_bert(name: str, options: Mapping[str, str]) -> Task:
    task = f"{SYNTHETIC}:{name}"
    chosen = read_options(TextOptions, options, task=task)
    transformers = import_extra(
        "transformers", library="transformers", extra="transformers", needed_by=f"task {task}"
    )
    hidden, layers, heads = _BERT_SIZES[name]
    config = transformers.BertConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        max_position_embeddings=max(512, chosen.seq_len),
    )
    generator = torch.Generator().manual_seed(0)
    size = (NUM_DISTINCT, chosen.seq_len)
    tokens = torch.randint(config.vocab_size, size, generator=generator)
    labels = torch.randint(config.vocab_size, size, generator=generator)
    follows = torch.randint(2, (NUM_DISTINCT,), generator=generator)
    data = Repeated(list(zip(tokens, labels, follows, strict=True)), chosen.samples)
    model = transformers.BertForPreTraining(config)
    return _task(
        task, model, data, loss=_pretraining_loss, unit="tokens", per_sample=chosen.seq_len
    )


def _pretraining_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Masked-token plus next-sentence loss, with every token predicted: the costliest case."""
    tokens, labels, follows = batch
    loss: Tensor = model(input_ids=tokens, labels=labels, next_sentence_label=follows).loss
    return loss


def _task(
    name: str, model: nn.Module, data: Samples, *, loss: Any, unit: str, per_sample: int
) -> Task:
    return Task(
        name=name,
        model=model,
        train_data=data,
        loss=loss,
        unit=unit,
        units_per_sample=per_sample,
        notes=[
            f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters, "
            f"{len(data)} samples of random input"
        ],
        defaults={
            "optimizer": "SGD",
            "optimizer_options": {"momentum": 0.9},
            "lr": 1e-3,
            "batch_size": 16,
            "max_steps": 50,
            "warmup_steps": 0,
            "lr_schedule": "constant",
        },
    )
