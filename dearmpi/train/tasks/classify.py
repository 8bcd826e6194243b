"""Classification of images: samples, a small network, loss and accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

LabelledBatch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Labelled:
    """Images in memory, (n, channels, height, width), with their class numbers (n)."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> LabelledBatch:
        return self.images[index], self.labels[index]


class SmallConvNet(nn.Module):
    """Two convolutions to a stage, each stage halving the image down to about 4 x 4, then two
    linear layers. No layer looks at other samples, so a batch may be cut over ranks in any way.
    """

    def __init__(self, *, channels: int, size: int, num_classes: int, width: int) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        inputs, outputs = channels, width
        while True:
            stages += [
                nn.Conv2d(inputs, outputs, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(outputs, outputs, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2, ceil_mode=True),
            ]
            size = -(-size // 2)
            if size <= 4:
                break
            inputs, outputs = outputs, min(2 * outputs, 8 * width)
        self.features = nn.Sequential(*stages)
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(outputs * size * size, 4 * width),
            nn.ReLU(),
            nn.Linear(4 * width, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """images: (n, channels, size, size); out: (n, num_classes)."""
        logits: Tensor = self.classifier(self.features(images))
        return logits


def classification_loss(model: nn.Module, batch: LabelledBatch) -> Tensor:
    """Mean cross-entropy over the batch of images and class numbers."""
    images, labels = batch
    return functional.cross_entropy(_logits(model, images), labels)


@torch.no_grad()
def classification_metrics(model: nn.Module, batch: LabelledBatch) -> Mapping[str, float]:
    """Number of images whose likeliest class is theirs, as ``accuracy``."""
    images, labels = batch
    return {"accuracy": float((_logits(model, images).argmax(dim=1) == labels).sum())}


def _logits(model: nn.Module, images: Tensor) -> Tensor:
    """Class scores of a model that returns them plainly, or as ``.logits`` as transformers do."""
    # A model converted to another precision gets its images in that precision.
    output: Any = model(images.to(next(model.parameters()).dtype))
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
