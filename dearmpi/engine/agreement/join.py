"""Joining: what a rank without batches does while others still train.

It takes part in every collective with zero gradients. Its own learning-rate scheduler no longer
runs, so it takes the hyperparameters of each step from the ranks that still train: those send
theirs, an exhausted rank sends minus infinity, and the maximum is what the step uses. In the same
way it learns how they clip.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dearmpi.comm.api.collectives import Collectives, Completed, ReduceOp, Request
from dearmpi.comm.progress.channel import Channel
from dearmpi.engine.update.update import Options
from dearmpi.errors import ReplicaMismatchError, UsageError

STEP, CLIP, GATHER, SEND = 0.0, 1.0, 2.0, 3.0
"""What ranks that still train do next: step; clip, to a norm of a type; gather whole gradients;
send those that they have changed, with a checksum of the changes."""
_ACTIONS = {
    STEP: "step",
    CLIP: "clip",
    GATHER: "read param.grad",
    SEND: "send gradients that it has changed",
}
Action = tuple[float, float, float]
_thread = threading.local()  # whether it is inside a join()


class Joining:
    """Whether ranks may take unequal numbers of steps now (``is_open``), and what they exchange
    meanwhile over ``channel``, in the same order on all; a rank alone has none.
    """

    def __init__(self, channel: Channel | None, *, rank: int = 0, size: int = 1) -> None:
        self._channel = channel
        self._rank = rank
        self._training = torch.zeros(size, dtype=torch.float64, device="cpu")
        self.is_open = self.is_announced = False

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Ranks may. Raises UsageError where they may already: an exhausted rank would take part in
        the steps of one optimizer, while the others wait for it in those of the other.
        """
        if getattr(_thread, "is_inside", False):
            raise UsageError(
                "join() inside join(): a rank without batches takes part in the steps of one "
                "DistributedOptimizer alone; give every rank as many batches (drop_last), or make "
                "one optimizer with param groups of both",
                code="join-misused",
            )
        self.is_open = _thread.is_inside = True
        try:
            yield
        finally:
            self.is_open = self.is_announced = _thread.is_inside = False

    def refuse(self, what: str) -> None:
        """Raise UsageError for ``what``, if ranks may."""
        if self.is_open:
            raise UsageError(
                f"{what} is not supported inside join(): a rank without batches takes part in one "
                "reduction for each step",
                code="join-misused",
            )

    def announce(self, active: bool) -> None:
        """Say whether this rank still trains, before each step (collective)."""
        numbers = torch.zeros_like(self._training)
        numbers[self._rank] = active
        self._training = self._reduce("who trains", numbers, "sum")

    def announce_forward(self) -> bool:
        """Say before the first forward of a step that this rank trains, and not when its backward
        begins; False if it is said, or no rank asks (collective).
        """
        if not self.is_open or self.is_announced:
            return False
        self.announce(True)
        self.is_announced = True
        return True

    def training_ranks(self) -> list[int]:
        """The ranks that still did at the last ``announce``, of which the next or last step is."""
        self.wait()
        ranks: list[int] = self._training.nonzero().flatten().tolist()
        return ranks

    def announce_next(self, kind: float, first: float = 0.0, second: float = 0.0) -> None:
        """What this rank, which still trains, is about to do (collective)."""
        if self.is_open:
            assert self._channel is not None, "a rank alone says nothing"
            numbers = _numbers_of(kind, -kind, first, second)
            self._reduce("next action", numbers, "max")

            def check(_: Collectives) -> Request:
                _check_next(numbers)
                return Completed()

            self._channel.submit("comparison of next actions", check)

    def announce_clip(self, max_norm: float, norm_type: float) -> None:
        """This rank, which still trains, is about to clip (collective)."""
        self.announce_next(CLIP, max_norm, norm_type)

    def find_next(self) -> Action:
        """What those that still train are about to do (collective)."""
        numbers = self._reduce("next action", _numbers_of(*[-math.inf] * 4), "max")
        self.wait()
        _check_next(numbers)
        kind, _, first, second = numbers.tolist()
        return kind, first, second

    def broadcast_changed(self, gradients: Tensor) -> None:
        """Overwrite whole gradients by those of a rank that still trains (collective)."""
        assert self._channel is not None, "a rank alone sends nothing"
        sent, root = gradients.cpu(), self.training_ranks()[-1]
        self._channel.run("changed gradients", lambda c: c.start_broadcast(sent, root))
        gradients.copy_(sent)

    def announce_step(self, own: Options, *, exhausted: bool) -> Options:
        """This rank is about to step, with its ``own`` options; those of the others, if it has
        ``exhausted`` (collective).
        """
        if not self.is_open:
            return own
        numbers = self._exchange_options(own, exhausted=exhausted)
        if not exhausted:
            return own
        self.wait()
        return unpack(own, numbers)

    def wait(self) -> None:
        """Wait until what was said to other ranks has arrived."""
        assert self._channel is not None, "a rank alone waits for nobody"
        self._channel.run("wait for what ranks exchange in join()", lambda _: Completed())

    def _exchange_options(self, own: Options, *, exhausted: bool) -> Tensor:
        """The largest of each number over ranks, which must all have as many of the same names."""
        assert self._channel is not None, "a rank alone exchanges nothing"
        names = describe_numbers(own)
        number = zlib.crc32(names.encode(errors="replace"))
        seen = self._reduce("names of options", _numbers_of(number, -number), "max")
        numbers = pack(own, exhausted=exhausted)

        def start(collectives: Collectives) -> Request:
            most, of_negatives = seen.tolist()  # known by now: one operation follows the other
            if most != -of_negatives:
                raise ReplicaMismatchError(
                    "inside join() ranks have param groups with other options, and those without "
                    f"batches cannot take over the others'; this rank's are {names}; set the same "
                    "options on every rank, and make schedulers on all of them",
                    code="ranks-differ-in-options",
                )
            return collectives.start_all_reduce(numbers, "max")

        self._channel.submit("options", start)
        return numbers

    def _reduce(self, label: str, numbers: Tensor, operation: ReduceOp) -> Tensor:
        assert self._channel is not None, "a rank alone exchanges nothing"
        self._channel.submit(label, lambda c: c.start_all_reduce(numbers, operation))
        return numbers


def pack(options: Options, *, exhausted: bool) -> Tensor:
    """All numbers among the hyperparameters, by group and name, in fp64."""
    values = [value for group in options for _, value in _numbers(group)]
    return _numbers_of(*([-math.inf] * len(values) if exhausted else values))


def describe_numbers(options: Options) -> str:
    """The names of the numbers that ``pack`` gives, such as ``lr, momentum in group 0``."""
    return ", ".join(
        f"{', '.join(str(key) for key, _ in _numbers(group))} in group {number}"
        for number, group in enumerate(options)
    )


def _check_next(numbers: Tensor) -> None:
    """Raise ReplicaMismatchError unless all ranks that still train do the same next.

    numbers: the largest kind of action, the largest of its negative, and what belongs to it.
    """
    most, of_negatives = numbers[:2].tolist()
    if most != -of_negatives:
        raise ReplicaMismatchError(
            f"inside join() one rank is about to {_ACTIONS[-of_negatives]}, while another is about "
            f"to {_ACTIONS[most]}; read, change and clip gradients on every rank that has a "
            "batch, or on none",
            code="ranks-change-gradients-differently",
        )


def _numbers_of(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def unpack(options: Options, packed: Tensor) -> list[dict[str, Any]]:
    """``options`` with the numbers replaced by those in ``packed``."""
    values = iter(packed.tolist())
    return [_with_numbers(group, values) for group in options]


def _numbers(group: Any) -> Iterator[tuple[Any, float]]:
    """Key and value of every number in a group, those in pairs and 0-d tensors included."""
    for key, value in _sorted_items(group):
        for number in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(number, (bool, int, float)) or _is_scalar(number):
                yield key, float(number)


def _with_numbers(group: Any, values: Iterator[float]) -> dict[str, Any]:
    replaced: dict[str, Any] = {}
    for key, value in _sorted_items(group):
        if isinstance(value, (tuple, list)):
            replaced[key] = type(value)(_replace(number, values) for number in value)
        else:
            replaced[key] = _replace(value, values)
    return replaced


def _sorted_items(group: Any) -> list[tuple[Any, Any]]:
    """Of ranks that have set them in another order, the same."""
    return sorted(group.items(), key=lambda item: str(item[0]))


def _replace(value: Any, values: Iterator[float]) -> Any:
    if isinstance(value, (bool, int, float)):
        return type(value)(next(values))
    if _is_scalar(value):
        return torch.full_like(value, next(values))
    return value


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0
