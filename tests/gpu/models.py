"""Models of the paper that need nothing but torch, with its batch sizes.

Shapes follow He et al. (2016) for ResNet-50, Huang et al. (2017) for DenseNet-201 and Devlin et
al. (2019) for BERT.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

SEQUENCE = 64
VOCABULARY = 30522
NUM_CLASSES = 1000
ABSENT = {"inception_v4": "no model of it without timm"}


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *convolution(inputs, width, 1),
            nn.ReLU(),
            *convolution(width, width, 3, stride),
            nn.ReLU(),
            *convolution(width, outputs, 1),
        )
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(*convolution(inputs, outputs, 1, stride))

    def forward(self, inputs: Tensor) -> Tensor:
        total: Tensor = self.body(inputs) + self.shortcut(inputs)
        return total.relu()


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


def resnet50() -> nn.Module:
    layers = [*convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, depth in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for number in range(depth):
            stride = 2 if number == 0 and width > 64 else 1
            layers.append(Bottleneck(inputs, width, stride))
            inputs = 4 * width
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, NUM_CLASSES)
    )


class DenseLayer(nn.Module):
    """Adds 32 channels to its input."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(inputs),
            nn.ReLU(),
            nn.Conv2d(inputs, 128, 1, bias=False),
            nn.BatchNorm2d(128),
            nn.ReLU(),
            nn.Conv2d(128, 32, 3, padding=1, bias=False),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cat([inputs, self.body(inputs)], dim=1)


def densenet201() -> nn.Module:
    layers = [*convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for number, depth in enumerate((6, 12, 48, 32)):
        if number:
            layers += [nn.BatchNorm2d(channels), nn.ReLU()]
            layers += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
            channels //= 2
        for _ in range(depth):
            layers.append(DenseLayer(channels))
            channels += 32
    head = [nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, *head, nn.Linear(channels, NUM_CLASSES))


class Bert(nn.Module):
    """Embeddings, encoder, and a decoder that is tied to the embedding."""

    def __init__(self, hidden: int, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, hidden)
        self.places = nn.Embedding(512, hidden)
        self.norm = nn.LayerNorm(hidden)
        layer = nn.TransformerEncoderLayer(
            hidden, num_heads, 4 * hidden, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.transform = nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), nn.LayerNorm(hidden))
        self.decoder = nn.Linear(hidden, VOCABULARY)
        self.decoder.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.size(1), device=tokens.device)
        hidden = self.encoder(self.norm(self.words(tokens) + self.places(places)))
        logits: Tensor = self.decoder(self.transform(hidden))
        return logits.flatten(0, 1)


@dataclass(frozen=True, slots=True)
class Workload:
    """A model of the paper. reads_text: its samples are tokens, else images."""

    name: str
    build: Callable[[], nn.Module]
    batch_size: int
    reads_text: bool = False

    def batch(self, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Random inputs, and what is to come out."""
        if self.reads_text:
            tokens = torch.randint(VOCABULARY, (size, SEQUENCE), device=device)
            return tokens, tokens.flatten()
        images = torch.randn(size, 3, 224, 224, device=device)
        return images, torch.randint(NUM_CLASSES, (size,), device=device)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("resnet50", resnet50, 64),
        Workload("densenet201", densenet201, 32),
        Workload("bert_base", lambda: Bert(768, 12, 12), 64, reads_text=True),
        Workload("bert_large", lambda: Bert(1024, 24, 16), 32, reads_text=True),
    )
}
