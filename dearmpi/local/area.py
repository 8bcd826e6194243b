"""Training by the area under the ROC curve: the loss and the optimizer of CoDA, the exact area over
all ranks, and batches that have both classes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dearmpi.comm.lifecycle import choose_world
from dearmpi.comm.world import World
from dearmpi.errors import ConfigError, UsageError
from dearmpi.plan.data.local_schedule import check_count


class AucLoss(nn.Module):
    """The area under the ROC curve as a loss: minimised over two parameters, maximised over one.

    Squared loss of all pairs of a positive and a negative sample, as a mean over samples.

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
        """The loss of a batch. scores: (n,), in [0, 1]. labels: (n,), 0 or 1.

        A batch of one class has no pairs: it moves ``a`` or ``b`` and the scores alone.
        Raises ConfigError for scores in host memory out of their range, unless there is a margin.
        Also for scores and labels of different shapes, and for none.
        """
        if scores.shape != labels.shape or not scores.numel():
            raise ConfigError(
                f"scores are of shape {tuple(scores.shape)} and labels of {tuple(labels.shape)}; "
                "give one score for each label, such as model(x).squeeze(1), and at least one",
                code="wrong-type",
            )
        p = self.positive_share
        if self.margin is None and scores.device.type == "cpu":
            _check_scores(scores.detach())
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


def _check_scores(scores: Tensor) -> None:
    if len(scores) and not torch.compiler.is_compiling():
        least, most = (float(value) for value in scores.aminmax())
        if least < 0 or most > 1:
            raise ConfigError(
                f"scores go from {least:.6g} to {most:.6g}, but without a margin the loss is of "
                "scores from 0 to 1; give torch.sigmoid(scores), or a margin",
                code="out-of-range",
            )


class _Ascend(torch.autograd.Function):
    """The same value; the gradient with its sign turned."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return -grads[0]


class PrimalDual(Optimizer):
    """SGD near the point at which its stage began, and ascent in what an ``AucLoss`` maximises.

    The optimizer of CoDA is ``LocalOptimizer.average(PrimalDual(...))``.

    A stage has ``stage_steps`` steps; then the learning rate is divided by ``decay``, and
    parameters are held near where they are now. Give ``stage_steps`` as a multiple of
    ``sync_every``, so that a stage begins with equal parameters.

    correct: changes a parameter's gradient in place, once it is clipped; None: nothing does.

    Source: CoDA, arXiv 2005.02426, with the last iterate of a stage as its code has it.
    """

    correct: Callable[[Tensor, Tensor], object] | None = None

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 0.1,
        gamma: float = 500.0,
        stage_steps: int | None = None,
        decay: float = 3.0,
        clip: float | None = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        """gamma: parameters are pulled back by their distance over it; ``inf``: not at all.
        clip: of the gradient's norm over all parameters; None: none. stage_steps: None: one stage.

        Raises ConfigError for numbers out of range.
        """
        for name, value, is_good in (
            ("lr", lr, 0 < lr < math.inf),
            ("gamma", gamma, gamma > 0),
            ("stage_steps", stage_steps, stage_steps is None or stage_steps >= 1),
            ("decay", decay, 1 <= decay < math.inf),
            ("clip", clip, clip is None or clip > 0),
            ("weight_decay", weight_decay, 0 <= weight_decay < math.inf),
        ):
            if not is_good:
                raise ConfigError(f"{name} is {value}, out of its range", code="out-of-range")
        defaults = {"lr": lr, "gamma": gamma, "stage_steps": stage_steps, "decay": decay}
        super().__init__(params, {**defaults, "clip": clip, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step on the parameters that have gradients. It counts for all of them."""
        if closure is not None:
            raise UsageError(
                "PrimalDual has no step() with a closure: call backward() before step()",
                code="local-steps-forbid",
            )
        used = []
        for group in self.param_groups:
            for param in group["params"]:
                stage = self._count(param, group)
                if param.grad is not None:
                    used.append((group, param, param.grad.clone(), stage))
        clips = any(group["clip"] is not None for group, _, _, _ in used)
        norm = torch.nn.utils.get_total_norm([grad for _, _, grad, _ in used]) if clips else None
        for group, param, grad, stage in used:
            if norm is not None and group["clip"] is not None:
                grad.mul_((group["clip"] / (norm + 1e-6)).clamp(max=1.0))
            if self.correct is not None:
                self.correct(param, grad)
            self._move(param, grad, group, stage)

    def _count(self, param: Tensor, group: dict[str, Any]) -> int:
        """The stage of the step that begins, whether or not ``param`` has a gradient in it."""
        state, length = self.state[param], group["stage_steps"]
        step = state.get("step", 0)
        begins = step == 0 or (length is not None and step % length == 0)
        if begins and not getattr(param, "is_dual", False) and math.isfinite(group["gamma"]):
            state["start"] = param.detach().clone()
        state["step"] = step + 1
        return 0 if length is None else int(step // length)

    def _move(self, param: Tensor, grad: Tensor, group: dict[str, Any], stage: int) -> None:
        is_dual, start = getattr(param, "is_dual", False), self.state[param].get("start")
        if not is_dual and start is not None:
            grad.add_(param - start, alpha=1 / group["gamma"])
        if not is_dual and group["weight_decay"]:
            grad.add_(param, alpha=group["weight_decay"])
        param.sub_(grad, alpha=group["lr"] / group["decay"] ** stage)
        if getattr(param, "least", None) is not None:
            param.clamp_(min=param.least)  # type: ignore[attr-defined]


def auc_of(scores: Tensor, labels: Tensor, world: World | None = None) -> float:
    """The chance that a positive sample of any rank scores above a negative one; a tie counts half.

    scores, labels: (n,), this rank's samples, with n of its own; labels above 0 are positive. The
    same on all ranks (collective), and not a mean of the ranks' own areas. NaN without samples of
    both classes, and for scores that are NaN.
    """
    if scores.shape != labels.shape or scores.dim() != 1:
        raise ConfigError(
            f"scores are of shape {tuple(scores.shape)} and labels of {tuple(labels.shape)}; give "
            "two of one dimension, and as long",
            code="wrong-type",
        )
    own = torch.stack([scores.detach().double().cpu(), (labels > 0).double().cpu()])
    values, positive = torch.cat(choose_world(world).all_gather_object(own), 1)
    return area_under(values, positive)


def area_under(scores: Tensor, labels: Tensor) -> float:
    """As ``auc_of``, of samples that this process has alone."""
    positive = labels > 0
    num_positive = int(positive.sum())
    num_negative = len(scores) - num_positive
    if not num_positive or not num_negative or bool(scores.isnan().any()):
        return math.nan
    _, group = scores.unique(return_inverse=True)  # sorted
    count = torch.bincount(group)
    of_positive = torch.bincount(group[positive], minlength=len(count))
    of_negative = count - of_positive
    below = of_negative.cumsum(0) - of_negative
    wins_twice = int((of_positive * (2 * below + of_negative)).sum())
    return wins_twice / (2 * num_positive * num_negative)


class BalancedBatches:
    """Lists of indices, as the ``batch_sampler`` of a ``DataLoader``: each has both classes.

    A rank draws from its own part of each class, without end: a class begins anew, in another
    order, once it is used up. An epoch goes once through the larger class, and has as many batches
    on every rank.
    """

    def __init__(
        self,
        labels: Tensor | Sequence[int],
        batch: int,
        positive_share: float = 0.5,
        *,
        rank: int = 0,
        size: int = 1,
        seed: int = 0,
    ) -> None:
        """labels: (n,), of all ranks' samples; above 0 is positive. batch: samples of this rank.
        positive_share: of a batch; each class has at least one sample in it.

        Raises ConfigError for classes with fewer samples than ranks, and numbers out of range.
        """
        for name, value, least in (("batch", batch, 2), ("size", size, 1), ("rank", rank, 0)):
            check_count(name, value, least)
        if rank >= size:
            raise ConfigError(
                f"rank is {rank}, but size is {size}; give a rank from 0 to {size - 1}",
                code="out-of-range",
            )
        positive = torch.as_tensor(labels) > 0
        if not 0 < positive_share < 1:
            raise ConfigError(
                f"positive_share is {positive_share}; it must be above 0 and below 1, so that a "
                "batch has both classes",
                code="out-of-range",
            )
        classes = [of.nonzero()[:, 0] for of in (positive, ~positive)]
        self._own = [places[rank::size] for places in classes]
        if min(map(len, classes)) < size:
            raise ConfigError(
                f"there are {int(positive.sum())} positive and {int((~positive).sum())} negative "
                f"samples for {size} ranks; give every rank samples of both classes",
                code="data-insufficient",
            )
        first = min(batch - 1, max(1, round(batch * positive_share)))
        self._sizes = (first, batch - first)
        # Of the rank that has most of a class: ranks must take equal numbers of steps.
        self._num_batches = max(
            math.ceil(math.ceil(len(places) / size) / number)
            for places, number in zip(classes, self._sizes, strict=True)
        )
        self._seed, self._rank, self._epoch = seed, rank, 0

    def __len__(self) -> int:
        return self._num_batches

    def set_epoch(self, epoch: int) -> None:
        """Draw as in ``epoch`` from the next iteration on; each iteration else is an epoch."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        mixed = (self._seed * 1_000_003 + self._epoch) * 65_537 + self._rank
        generator = torch.Generator().manual_seed(mixed % 2**64)  # it takes no larger number
        self._epoch += 1
        rows = []
        for own, size in zip(self._own, self._sizes, strict=True):
            rounds = math.ceil(len(self) * size / len(own))
            order = torch.cat(
                [own[torch.randperm(len(own), generator=generator)] for _ in range(rounds)]
            )
            rows.append(order[: len(self) * size].view(len(self), size))
        yield from torch.cat(rows, 1).tolist()
