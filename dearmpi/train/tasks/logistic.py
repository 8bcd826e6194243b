"""Logistic regressions that clients share: strongly convex, with an optimum that is known.

The data are tables of scikit-learn, so that nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dearmpi.errors import ConfigError
from dearmpi.train.tasks.task import import_extra

Split = Literal["label", "shuffled"]
_MOST_NEWTON = 100


@dataclass(frozen=True, slots=True)
class LogisticProblem:
    """The mean over clients of regularised logistic losses, each the mean over a client's samples.

    rows: (clients, most samples, features), each sample times its sign, padded with zeros.
    counts: (clients, 1), samples of each. smoothness, convexity: L of the worst client, and mu.
    """

    name: str
    rows: Tensor
    counts: Tensor
    smoothness: float
    convexity: float

    @property
    def num_clients(self) -> int:
        return len(self.rows)

    @property
    def size(self) -> int:
        """Features, of which the last is constant."""
        return int(self.rows.shape[2])

    def slopes_of(self, clients: Sequence[int]) -> Callable[[Tensor], Tensor]:
        """Gradients of ``clients``' functions, at a point each: (clients, size) to the same."""
        rows, counts = self.rows[list(clients)], self.counts[list(clients)]
        columns = rows.transpose(1, 2)

        def slopes(points: Tensor) -> Tensor:
            margins = torch.bmm(rows, points.unsqueeze(2))
            pulls = torch.bmm(columns, torch.sigmoid(-margins)).squeeze(2)
            return points * self.convexity - pulls / counts

        return slopes

    def mean_slope(self, point: Tensor) -> Tensor:
        """The gradient of the mean of all functions."""
        everyone = range(self.num_clients)
        return self.slopes_of(everyone)(point.expand(self.num_clients, -1)).mean(0)

    def optimum(self) -> Tensor:
        """By Newton's method, with shorter steps as long as the gradient would grow."""
        point = self.rows.new_zeros(self.size)
        slope = self.mean_slope(point)
        for _ in range(_MOST_NEWTON):
            step = torch.linalg.solve(self._curvature(point), slope)
            length = 1.0
            found = self.mean_slope(point - step)
            while found.norm() > slope.norm() and length > 1e-6:
                length /= 2
                found = self.mean_slope(point - length * step)
            if found.norm() >= slope.norm():
                break
            point, slope = point - length * step, found
        return point

    def _curvature(self, point: Tensor) -> Tensor:
        chance = torch.sigmoid(-(self.rows @ point))
        weights = chance * (1 - chance) / self.counts / self.num_clients
        rows = self.rows.flatten(0, 1)
        return rows.T @ (rows * weights.reshape(-1, 1)) + self.convexity * torch.eye(
            self.size, dtype=rows.dtype
        )


def logistic_problem(
    name: str, *, num_clients: int, condition: float, split: Split = "label", seed: int = 0
) -> LogisticProblem:
    """In fp64, of ``breast-cancer`` or ``digits``, 0-4 against 5-9.

    condition: L / mu, by which the regularisation is chosen. split: ``label`` deals samples out
    sorted by class, so that most clients have one; ``shuffled`` deals them out at random.

    Raises TaskError where scikit-learn is not installed, ConfigError for numbers out of range.
    """
    features, signs, classes = read_table(name)
    if not 1 <= num_clients <= len(features):
        raise ConfigError(
            f"there are {num_clients} clients, and task {name} has {len(features)} samples; give "
            "from 1 client to as many as samples",
            code="out-of-range",
        )
    if not 1 < condition < float("inf"):
        raise ConfigError(
            f"the condition number is {condition}; it must be above 1, and finite",
            code="out-of-range",
        )
    if split == "label":
        order = torch.argsort(classes, stable=True)
    else:
        order = torch.randperm(len(features), generator=torch.Generator().manual_seed(seed))
    parts = torch.tensor_split((signs[:, None] * features)[order], num_clients)
    counts = torch.tensor([[float(len(part))] for part in parts], dtype=torch.float64)
    rows = torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
    largest = torch.linalg.matrix_norm(rows, 2).square() / (4 * counts[:, 0])
    smoothness = float(largest.max()) * condition / (condition - 1)
    return LogisticProblem(name, rows, counts, smoothness, smoothness / condition)


def read_table(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Standardised features with a constant one, (n, size) in fp64, signs, and classes to sort by.

    Raises TaskError where scikit-learn is not installed.
    """
    datasets: Any = import_extra(
        "sklearn.datasets", library="scikit-learn", extra="digits", needed_by=f"task {name}"
    )
    load = datasets.load_breast_cancer if name == "breast-cancer" else datasets.load_digits
    values, labels = load(return_X_y=True)
    features = torch.tensor(values, dtype=torch.float64)
    classes = torch.tensor(labels)
    spread = features.std(0)
    features = (features - features.mean(0)) / torch.where(spread > 0, spread, 1.0)
    features = torch.cat([features, torch.ones(len(features), 1, dtype=torch.float64)], 1)
    positive = classes < 5 if name == "digits" else classes > 0
    return features, torch.where(positive, 1.0, -1.0).double(), classes
