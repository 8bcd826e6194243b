"""auc:NAME: two classes, of which one may be rare, trained for the area under the ROC curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dearmpi.local.area import AucLoss, area_under
from dearmpi.train.tasks.image_models import Labelled, LabelledBatch, held_out_of_each_class
from dearmpi.train.tasks.logistic import read_table
from dearmpi.train.tasks.task import (
    AUC,
    Task,
    check_at_least,
    check_task_name,
    read_options,
)

_TEST_EVERY = 5
_EVERY_POSITIVE = 10  # of digits one in so many is kept, so that they are rare


@dataclass(frozen=True, slots=True)
class AucOptions:
    """Options of auc. width: of the hidden layer. margin: of the loss; none: the squared form."""

    width: int = 32
    margin: float | None = None

    def __post_init__(self) -> None:
        check_at_least(AUC, "width", self.width, 1)


class Scorer(nn.Module):
    """A score in [0, 1] from one hidden layer, with the loss that has parameters of its own."""

    def __init__(self, size: int, width: int, loss: AucLoss) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(size, width), nn.ReLU(), nn.Linear(width, 1))
        self.loss = loss

    def forward(self, batch: LabelledBatch) -> Tensor:
        """The loss of features (n, size) and labels (n)."""
        features, labels = batch
        loss: Tensor = self.loss(self.score(features), labels)
        return loss

    def score(self, features: Tensor) -> Tensor:
        """features: (n, size); out: (n)."""
        scores: Tensor = torch.sigmoid(self.layers(features.to(next(self.parameters()).dtype)))
        return scores[:, 0].float()


def build_auc(name: str, options: Mapping[str, str]) -> Task:
    """The task ``auc:NAME``: ``breast-cancer``, or ``digits``, 0-4 against 5-9 with the first made
    rare for training. A fifth of each class is held out.

    Raises TaskError for an unknown name or option, and where scikit-learn is not installed.
    """
    check_task_name(f"{AUC}:{name}")
    chosen = read_options(AucOptions, options, task=f"{AUC}:{name}")
    features, signs, _ = read_table(name)
    features, labels = features.float(), (signs > 0).long()
    test = held_out_of_each_class(labels.tolist(), _TEST_EVERY)
    kept = ~test
    if name == "digits":
        positive = ((labels > 0) & kept).nonzero()[:, 0]
        kept[positive] = False
        kept[positive[::_EVERY_POSITIVE]] = True
    share = float(labels[kept].float().mean())
    held_out = Labelled(features[test], labels[test])
    return Task(
        name=f"{AUC}:{name}",
        model=Scorer(features.shape[1], chosen.width, AucLoss(share, chosen.margin)),
        train_data=Labelled(features[kept], labels[kept]),
        eval_data=held_out,
        loss=lambda model, batch: model(batch),
        notes=[
            f"samples: {int(kept.sum())} to train on, {share:.1%} of them positive, "
            f"{int(test.sum())} to test"
        ],
        summarize=lambda model: _summarize(model, held_out),
        defaults={
            "optimizer": "AdamW",
            "lr": 5e-3,
            "batch_size": 128,
            "epochs": 60,
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
        },
    )


@torch.no_grad()
def _summarize(model: nn.Module, held_out: Labelled) -> Sequence[str]:
    assert isinstance(model, Scorer)
    device = next(model.parameters()).device
    scores = model.score(held_out.images.to(device))
    return [f"held-out AUC: {area_under(scores.cpu(), held_out.labels):.4f}"]
