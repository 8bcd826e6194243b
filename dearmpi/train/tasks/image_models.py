"""Image classification: models by name, samples in memory, loss and accuracy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dearmpi.config import known_names
from dearmpi.errors import TaskError
from dearmpi.train.tasks.task import import_extra

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


@dataclass(frozen=True, slots=True)
class ImageShape:
    """What a model must fit: RGB images of ``size`` x ``size``, and the number of classes."""

    size: int
    num_classes: int


def build_vision_model(name: str, shape: ImageShape, *, needed_by: str) -> nn.Module:
    """Build a model with random weights; nothing is downloaded.

    name: ``small``, ``torchvision:NAME``, ``timm:NAME``, or ``transformers:TYPE`` where TYPE is a
        model type such as ``resnet`` or ``vit`` in its default size.

    Raises TaskError for an unknown name, and for a library that is not installed.
    """
    if name == "small":
        return SmallConvNet(channels=3, size=shape.size, num_classes=shape.num_classes, width=16)
    library, _, model = name.partition(":")
    if library not in _LIBRARIES or not model:
        known = ["small", *(f"{known}:NAME" for known in _LIBRARIES)]
        raise TaskError(
            f"{needed_by}: there is no model {name!r}{known_names(name, known)}",
            code="unknown-choice",
        )
    try:
        return _LIBRARIES[library](model, shape, f"{needed_by} with model {name}")
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(
            f"{needed_by}: model {name} cannot be built for images of size {shape.size} and "
            f"{shape.num_classes} classes: {type(error).__name__}: {error}",
            code="model-not-built",
        ) from error


def _torchvision(model: str, shape: ImageShape, needed_by: str) -> nn.Module:
    models = import_extra(
        "torchvision.models", library="torchvision", extra="torchvision", needed_by=needed_by
    )
    known = sorted(models.list_models(module=models))
    if model not in known:
        raise TaskError(
            f"{needed_by}: torchvision has no such model{known_names(model, known)}",
            code="unknown-choice",
        )
    built: nn.Module = models.get_model(model, weights=None, num_classes=shape.num_classes)
    return built


def _timm(model: str, shape: ImageShape, needed_by: str) -> nn.Module:
    timm = import_extra("timm", library="timm", extra="timm", needed_by=needed_by)
    if not timm.is_model(model):
        close = timm.list_models(f"*{model}*")[:20]
        hint = f"; close: {', '.join(close)}" if close else "; timm.list_models() lists them"
        raise TaskError(f"{needed_by}: timm has no such model{hint}", code="unknown-choice")
    built: nn.Module = timm.create_model(model, pretrained=False, num_classes=shape.num_classes)
    return built


def _transformers(model: str, shape: ImageShape, needed_by: str) -> nn.Module:
    transformers = import_extra(
        "transformers", library="transformers", extra="transformers", needed_by=needed_by
    )
    automatic = transformers.AutoModelForImageClassification
    known = sorted(kind.model_type for kind in automatic._model_mapping)
    if model not in known:
        raise TaskError(
            f"{needed_by}: transformers has no such image classifier{known_names(model, known)}",
            code="unknown-choice",
        )
    config = transformers.AutoConfig.for_model(model, num_labels=shape.num_classes)
    if hasattr(config, "image_size"):
        config.image_size = shape.size
    built: nn.Module = automatic.from_config(config)
    return built


_LIBRARIES: Mapping[str, Callable[[str, ImageShape, str], nn.Module]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "transformers": _transformers,
}
