"""Image classification: models by name, samples in memory, loss and accuracy. The task digits is
a small convolutional network on the handwritten digits that scikit-learn brings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dearmpi.config import known_names
from dearmpi.errors import TaskError
from dearmpi.train.tasks.task import Task, check_at_least, import_extra, read_options

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


DIGITS = "digits"
NUM_CLASSES = 10
TEST_EVERY = 5


@dataclass(frozen=True, slots=True)
class DigitsOptions:
    """Options of digits. width: channels of the network's first layer."""

    width: int = 32

    def __post_init__(self) -> None:
        check_at_least(DIGITS, "width", self.width, 1)


def build_digits(options: Mapping[str, str]) -> Task:
    """The task: 1,797 images of 8 x 8, a fifth of each class held out.

    Raises TaskError for options, and where scikit-learn is not installed.
    """
    chosen = read_options(DigitsOptions, options, task=DIGITS)
    datasets = import_extra(
        "sklearn.datasets", library="scikit-learn", extra="digits", needed_by=f"task {DIGITS}"
    )
    digits = datasets.load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    test = held_out_of_each_class(labels.tolist(), TEST_EVERY)
    return Task(
        name=DIGITS,
        model=SmallConvNet(
            channels=1, size=images.shape[-1], num_classes=NUM_CLASSES, width=chosen.width
        ),
        train_data=Labelled(images[~test], labels[~test]),
        eval_data=Labelled(images[test], labels[test]),
        loss=classification_loss,
        metrics=classification_metrics,
        unit="images",
        notes=[f"images: {int((~test).sum())} to train on, {int(test.sum())} to test"],
        defaults={
            "optimizer": "AdamW",
            "lr": 4e-3,
            "batch_size": 64,
            "epochs": 20,
            "warmup_steps": 50,
            "weight_decay": 0.01,
            "lr_schedule": "cosine",
        },
    )


def held_out_of_each_class(labels: Sequence[int], every: int) -> Tensor:
    """Mask of samples to hold out: of each class, in the data's order, every ``every``-th one."""
    seen: dict[int, int] = {}
    mask = torch.zeros(len(labels), dtype=torch.bool)
    for place, label in enumerate(labels):
        seen[label] = seen.get(label, 0) + 1
        mask[place] = seen[label] % every == 0
    return mask
