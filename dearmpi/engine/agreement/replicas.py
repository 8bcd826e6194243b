"""Checks that find mistakes: ``DEAR_CHECK=1``, or ``check_every=K``. They cost time.

- ``Checks``: from the step on, shards that other ranks are still to send hold NaN. A module that
  computes NaN meanwhile has read a parameter too early, and is named. With gathered gradients each
  rank updates all it has, and nothing is filled.
- ``Replicas``: the result of every Kth step is compared between ranks while the next step is
  computed. To wait in the step would leave nothing under way in the next feed-forward, where
  parameters may be read too early. Ranks exchange the largest and the smallest of each hash, in one
  reduction; they gather all hashes only where these differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from dearmpi.comm.progress.channel import Channel
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.errors import MismatchError, UsageError
from dearmpi.torch_internals import unwrapped, without_modes
from dearmpi.tune.layer_passes import OwnHook


class Checks:
    """What is checked in each forward while a model trains."""

    def __init__(self, model: nn.Module, buckets: Sequence[BucketRuntime]) -> None:
        self._buckets = tuple(buckets)
        self._handles: list[RemovableHandle] = [
            module.register_forward_hook(OwnHook(self._name_early_reader(name, module)))
            for name, module in model.named_modules()
            if not isinstance(module, torch.jit.ScriptModule)  # which takes no hooks
        ]

    def remove(self) -> None:
        """Detach from the model."""
        for handle in self._handles:
            handle.remove()

    def _name_early_reader(self, name: str, module: nn.Module) -> Any:
        name = name or type(module).__name__

        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if is_dynamo_compiling():  # the graph would hold only while nothing is pending
                return
            pending = [bucket for bucket in self._buckets if bucket.pending]
            if pending and any(_has_nan(tensor) for tensor in _tensors(output)):
                names = [name for bucket in pending for name in bucket.spec.names]
                raise UsageError(
                    f"module {name} computed NaN while {len(names)} parameters were under way "
                    f"({', '.join(names[:4])} ...): it seems to read one through a reference that "
                    "does not wait; read it as an attribute of its module, or call "
                    "optimizer.synchronize() first",
                    code="read-of-stale-parameter",
                )

        return hook


def _has_nan(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    with without_modes():  # the modes of torch.vmap and of a fake forward let no number be read
        values = unwrapped(tensor)
        # A subclass may have no values, or exchange something to compute.
        has_values = type(values) in (Tensor, nn.Parameter) and not values.is_meta
        return has_values and values.layout is torch.strided and bool(torch.isnan(values).any())


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    if isinstance(value, dict):
        return _tensors(list(value.values()))
    return []


_HASH_DIGITS = 12  # of which fp64, in which they travel, holds every number exactly


class Replicas:
    """Hashes of parameters, of the order of collectives and of the optimizer's hyperparameters.

    Parameters are hashed as they arrive, before a script can do anything to them.
    num_steps: how many were taken. is_due: whether the step under way is to be compared.
    reduces, gathers: buckets whose collectives were posted since the last exchange, in order.
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
        self._exchanged = _in_fp64(self._own)
        self._channel: Channel | None = None
        self._await: Callable[[], None] | None = None
        self._compared_step = 0

    def begin(self) -> None:
        """An iteration begins: nothing is under way, and what was to be exchanged is."""
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

    def announce(self, channel: Channel) -> None:
        """All of the step has arrived: begin to exchange it, for ``compare``, unless it is
        not to be compared or they know (collective).
        """
        if not self._is_open:
            return
        self._hashes[self._subjects[-2]] = _number(str((self.reduces, self.gathers)).encode())
        self.reduces, self.gathers = [], []
        self._own = [self._hashes[what] for what in self._subjects]
        self._exchanged = _in_fp64([*self._own, *(-own for own in self._own)])
        self._channel, self._compared_step, self._is_open = channel, self.num_steps, False
        self._await = channel.begin(
            "comparison of replicas", lambda c: c.start_all_reduce(self._exchanged, "max")
        )

    def compare(self) -> None:
        """Wait for what the ranks exchange. Raises MismatchError, on all of them alike,
        if replicas differ (collective).
        """
        if self._await is None:
            return
        self._await()
        self._await = None
        most, least = self._exchanged.view(2, -1)
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
        assert self._channel is not None, "nothing was announced"
        numbers_by_rank = _in_fp64([own if rank == self._rank else 0 for rank in range(self._size)])
        self._channel.run(
            "replicas that differ", lambda c: c.start_all_reduce(numbers_by_rank, "sum")
        )
        numbers: list[float] = numbers_by_rank.tolist()
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
