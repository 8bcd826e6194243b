"""What error feedback is worth: digits learned from a hundredth of each gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dearmpi.comm.algorithms.registry import CollectiveAlgorithms
from dearmpi.comm.algorithms.scratch import Scratch
from dearmpi.comm.api.collectives import Completed, Request
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.bucket.buffers import Arena
from dearmpi.engine.codec.residual import ErrorFeedback
from dearmpi.engine.codec.sparse import RandomBlocks
from dearmpi.plan.data.layout import build_layout, spec_of
from dearmpi.train.tasks.image_models import NUM_CLASSES, build_digits

RANKS, STEPS, RATE, BATCH, HIDDEN = 2, 4000, 0.02, 32, 64


class Together:
    """Collectives of ranks that take turns in one thread: the last to post forms the sums."""

    def __init__(self) -> None:
        self.rank, self._posted = 0, list[Tensor]()

    def start_reduce_scatter(self, buffer: Tensor, *_: Any, **__: Any) -> Request:
        self._posted.append(buffer)
        if len(self._posted) == RANKS:
            shards = torch.stack(self._posted).sum(0).view(RANKS, -1)
            for rank, posted in enumerate(self._posted):
                posted.view(RANKS, -1)[rank] = shards[rank]
            self._posted.clear()
        return Completed()


Reduce = Callable[[list[Tensor]], Tensor]


def dense(gradients: list[Tensor]) -> Tensor:
    return torch.stack(gradients).sum(0)


def sparse(numel: int, *, keeps: bool) -> Reduce:
    """The sum that owners get of a hundredth of each gradient."""
    param = nn.Parameter(torch.zeros(numel))
    layout = build_layout([[spec_of(param, "p")]], RANKS)
    buckets = [
        BucketRuntime(
            layout.buckets[0], [param], rank=rank, gradients=Arena(layout), parameters=None
        )
        for rank in range(RANKS)
    ]
    scratch, algorithm = Scratch(), CollectiveAlgorithms("ring")
    codecs = [
        RandomBlocks(
            bucket, algorithm, scratch, density=0.01, feedback=ErrorFeedback(RANKS, keeps=keeps)
        )
        for bucket in buckets
    ]
    together: Any = Together()
    num_taken = 0

    def reduce(gradients: list[Tensor]) -> Tensor:
        nonlocal num_taken
        requests = []
        for rank, (bucket, codec) in enumerate(zip(buckets, codecs, strict=True)):
            together.rank = rank
            bucket.gradients.data[:numel] = gradients[rank]
            requests.append(codec.start(bucket, together, num_taken))
        num_taken += 1
        for rank, request in enumerate(requests):
            together.rank = rank
            while not request.test():
                pass
        shards = [bucket.gradients.shard.clone() for bucket in buckets]
        for bucket, codec in zip(buckets, codecs, strict=True):
            codec.commit(bucket, is_final=True)
        return torch.cat(shards)[:numel]

    return reduce


def learn(make_reduce: Callable[[int], Reduce]) -> float:
    """The accuracy on held-out digits after some steps of plain SGD."""
    task = build_digits({})
    images, labels = read(task.train_data)
    reduce = make_reduce(HIDDEN * (images.shape[1] + NUM_CLASSES))
    generator = torch.Generator().manual_seed(0)
    inner = torch.randn(images.shape[1], HIDDEN, generator=generator) / 12
    outer = torch.randn(HIDDEN, NUM_CLASSES, generator=generator) / 12
    for _ in range(STEPS):
        gradients = []
        for _ in range(RANKS):
            chosen = torch.randint(len(images), (BATCH,), generator=generator)
            gradients.append(gradient_of(inner, outer, images[chosen], labels[chosen]))
        change = reduce(gradients).mul_(-RATE / RANKS)
        inner += change[: inner.numel()].view_as(inner)
        outer += change[inner.numel() :].view_as(outer)
    assert task.eval_data is not None
    images, labels = read(task.eval_data)
    guesses = ((images @ inner).relu() @ outer).argmax(1)
    return float((guesses == labels.argmax(1)).double().mean())


def read(samples: Any) -> tuple[Tensor, Tensor]:
    """Images in rows, each with a one at its end, and labels in rows of zeros and a one."""
    images, labels = map(torch.stack, zip(*samples, strict=True))
    flat = torch.cat([images.flatten(1), torch.ones(len(images), 1)], 1)
    return flat, nn.functional.one_hot(labels, NUM_CLASSES).float()


def gradient_of(inner: Tensor, outer: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    """Of the cross entropy of a network with one hidden layer, by hand: autograd takes longer."""
    hidden = (images @ inner).relu()
    off = ((hidden @ outer).softmax(1) - labels) / len(images)
    parts = images.T @ (off @ outer.T * (hidden > 0)), hidden.T @ off
    return torch.cat([part.reshape(-1) for part in parts])


def test_a_hundredth_of_each_gradient_is_enough_with_error_feedback_alone() -> None:
    whole = learn(lambda numel: dense)
    kept = learn(lambda numel: sparse(numel, keeps=True))
    dropped = learn(lambda numel: sparse(numel, keeps=False))
    assert whole > 0.94
    assert kept > whole - 0.01
    assert dropped < whole - 0.3
