"""digits: a small convolutional network on the handwritten digits that scikit-learn brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dearmpi.train.tasks.image_models import (
    Labelled,
    SmallConvNet,
    classification_loss,
    classification_metrics,
)
from dearmpi.train.tasks.task import Task, check_at_least, import_extra, read_options

NAME = "digits"
NUM_CLASSES = 10
TEST_EVERY = 5


@dataclass(frozen=True, slots=True)
class DigitsOptions:
    """Options of digits. width: channels of the network's first layer."""

    width: int = 32

    def __post_init__(self) -> None:
        check_at_least(NAME, "width", self.width, 1)


def build_digits(options: Mapping[str, str]) -> Task:
    """The task: 1,797 images of 8 x 8, a fifth of each class held out.

    Raises TaskError for options, and where scikit-learn is not installed.
    """
    chosen = read_options(DigitsOptions, options, task=NAME)
    datasets = import_extra(
        "sklearn.datasets", library="scikit-learn", extra="digits", needed_by=f"task {NAME}"
    )
    digits = datasets.load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    test = held_out_of_each_class(labels.tolist(), TEST_EVERY)
    return Task(
        name=NAME,
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
