"""Replicas: what every Kth step has led to on each rank, compared while the next one is computed.

To wait for it in the step would be to have nothing under way in the next feed-forward, where
parameters may be read too early. Ranks tell each other no more than the largest and the smallest of
each hash, in one reduction; who has what they only ask where these differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from dearmpi.comm.progress.channel import Channel
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.errors import MismatchError

_HASH_DIGITS = 12  # of which fp64, in which they travel, holds every number exactly


class Replicas:
    """Hashes of parameters, of the order of collectives and of the optimizer's hyperparameters.

    Parameters are hashed as they arrive, before a script can do anything to them.
    num_steps: how many were taken. is_due: whether the step under way is to be compared.
    reduces, gathers: buckets whose collectives were posted since ranks were told, in order.
    """

    def __init__(
        self, buckets: Sequence[BucketRuntime], *, rank: int, size: int, every: int
    ) -> None:
        self._buckets, self._rank, self._size, self._every = tuple(buckets), rank, size, every
        names = [name for bucket in buckets for name in bucket.spec.names]
        self._subjects = (*names, "the order of collectives", "a hyperparameter")
        self.num_steps = 0
        self.reduces: list[int] = []
        self.gathers: list[int] = []
        self.is_due = self._is_open = False
        self._hashes: dict[str, int] = {}
        self._own: list[int] = []
        self._told = _in_fp64(self._own)
        self._channel: Channel | None = None
        self._await: Callable[[], None] | None = None
        self._compared_step = 0

    def begin(self) -> None:
        """An iteration begins: nothing is under way, and what was to be told is."""
        self.is_due = (self.num_steps + 1) % self._every == 0
        self._hashes = {}

    def arrived(self, bucket: BucketRuntime) -> None:
        """Parameters of ``bucket`` are those after the step, and nobody else reads them yet."""
        if self.is_due:
            for name, param in zip(bucket.spec.names, bucket.params, strict=True):
                self._hashes[name] = _hash_of(param.detach())

    def stepped(self, options: str, idle: Iterable[BucketRuntime]) -> None:
        """A step was taken with ``options``, in which buckets ``idle`` took no part."""
        self.num_steps += 1
        self._is_open = self.is_due
        if self.is_due:
            self._hashes[self._subjects[-1]] = _number(options.encode())
            for bucket in idle:
                self.arrived(bucket)

    def tell(self, channel: Channel) -> None:
        """All of the step has arrived: begin to tell the other ranks, for ``compare``, unless it is
        not to be compared or they know (collective).
        """
        if not self._is_open:
            return
        self._hashes[self._subjects[-2]] = _number(str((self.reduces, self.gathers)).encode())
        self.reduces, self.gathers = [], []
        self._own = [self._hashes[what] for what in self._subjects]
        self._told = _in_fp64([*self._own, *(-own for own in self._own)])
        self._channel, self._compared_step, self._is_open = channel, self.num_steps, False
        self._await = channel.begin(
            "comparison of replicas", lambda c: c.start_all_reduce(self._told, "max")
        )

    def compare(self) -> None:
        """Wait for what the ranks have told each other. Raises MismatchError, on all of them alike,
        if replicas differ (collective).
        """
        if self._await is None:
            return
        self._await()
        self._await = None
        most, least = self._told.view(2, -1)
        differing = (most != -least).nonzero().flatten().tolist()
        if not differing:
            return
        self._is_open = False  # the next step can only differ as well
        first, *others = self._gather(self._own[differing[0]])
        rank, other = next((r, o) for r, o in enumerate(others, start=1) if o != first)
        raise MismatchError(
            f"after step {self._compared_step}, {self._subjects[differing[0]]} differs between "
            f"ranks: hash {_digits(first)} on rank 0, {_digits(other)} on rank {rank}. Parameters "
            "must be changed by the optimizer alone, or alike on every rank",
            code="replicas-differ",
        )

    def _gather(self, own: int) -> list[float]:
        """A number of each rank's, by rank (collective)."""
        assert self._channel is not None, "nothing was told"
        told = _in_fp64([own if rank == self._rank else 0 for rank in range(self._size)])
        self._channel.run("replicas that differ", lambda c: c.start_all_reduce(told, "sum"))
        numbers: list[float] = told.tolist()
        return numbers


def _in_fp64(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")


def _hash_of(tensor: Tensor) -> int:
    # What counts as contiguous may have strides, such as 1x1 kernels in channels-last.
    data = tensor.cpu().reshape(-1).clone(memory_format=torch.contiguous_format)
    return _number(data.view(torch.uint8).numpy().tobytes())


def _number(data: bytes) -> int:
    return int(hashlib.sha256(data).hexdigest()[:_HASH_DIGITS], 16)


def _digits(number: float) -> str:
    return f"{int(number):0{_HASH_DIGITS}x}"
