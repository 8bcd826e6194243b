"""AucLoss: the area under the ROC curve as a loss, with a minimum over two parameters and a maximum
over one.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from dearmpi.errors import ConfigError


class AucLoss(nn.Module):
    """Squared loss of all pairs of a positive and a negative sample, as a mean over samples.

    It has parameters of its own, ``a``, ``b`` and ``alpha``: hold it in the model that is trained,
    so that the optimizer trains and averages them as well. The gradient of ``alpha`` has its sign
    turned, since the loss is maximised over it: any optimizer that descends then does so.

    Source: CoDA, arXiv 2005.02426; with a ``margin``, arXiv 2012.03173.
    """

    def __init__(self, positive_share: float, margin: float | None = None) -> None:
        """positive_share: of the samples of all ranks. margin: by which a positive sample shall
        score higher; None: 1, without the bound ``alpha >= 0`` that makes easy pairs count less.

        Raises ConfigError for numbers out of range.
        """
        super().__init__()
        if not 0 < positive_share < 1:
            raise ConfigError(
                f"positive_share is {positive_share}; it must be above 0 and below 1: there must "
                "be samples of both classes",
                code="out-of-range",
            )
        if margin is not None and not 0 < margin < math.inf:
            raise ConfigError(
                f"margin is {margin}; it must be above 0, and finite", code="out-of-range"
            )
        self.positive_share, self.margin = positive_share, margin
        self.a = nn.Parameter(torch.zeros(()))
        self.b = nn.Parameter(torch.zeros(()))
        self.alpha = nn.Parameter(torch.zeros(()))
        self.alpha.is_dual = True  # type: ignore[attr-defined]
        self.alpha.least = None if margin is None else 0.0  # type: ignore[attr-defined]
        self._has_warned = False

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch. scores: (n,), in [0, 1] for the theory. labels: (n,), 0 or 1.

        A batch of one class has no pairs: it moves ``a`` or ``b`` and the scores alone.
        """
        p = self.positive_share
        positive = (labels > 0).to(scores.dtype)
        negative = 1 - positive
        has_both = positive.amax() * negative.amax()
        if not self._has_warned and has_both.device.type == "cpu" and not has_both:
            self._has_warned = True
            warnings.warn(
                "a batch has samples of one class alone, so that it has no pairs; draw batches by "
                "dearmpi.BalancedBatches",
                stacklevel=2,
            )
        alpha: Tensor = _Ascend.apply(self.alpha)  # type: ignore[no-untyped-call]
        if self.margin is not None:
            alpha = alpha + (alpha.clamp(min=0) - alpha).detach()
        spread = (1 - p) * (scores - self.a).square() * positive
        spread = spread + p * (scores - self.b).square() * negative
        gap = (p * scores * negative - (1 - p) * scores * positive).mean()
        if self.margin is None:
            pairs = 2 * gap + alpha * has_both * 2 * gap
        else:
            pairs = 2 * alpha * has_both * (p * (1 - p) * self.margin + gap)
        return spread.mean() + pairs - p * (1 - p) * alpha.square() * has_both


class _Ascend(torch.autograd.Function):
    """The same value; the gradient with its sign turned."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return -grads[0]
