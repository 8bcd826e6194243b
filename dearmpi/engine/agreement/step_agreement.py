"""Step agreement: what ranks exchange in every step, in one small reduction.

A number of two bytes for each thing, of which the largest over ranks counts. Where ranks must be
alike, its negative travels as well: the largest of that gives the smallest.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.update.update import Options
from dearmpi.errors import ReplicaMismatchError

# A learning rate as a number of two bytes: so many per doubling, from 2e-15 to 9e4.
_PER_DOUBLING, _OF_ONE, _LARGEST = 500, 24500, 2**15 - 1
_ACTIVE_BYTES = 4  # of a checksum of the buckets that travel
_NO_GRADIENT, _HAS_GRADIENT, _HAS_UNAVERAGED = range(3)  # the largest over ranks counts


class Loads:
    """Which states were loaded into this rank's optimizer since its buckets were laid out."""

    NUM_BYTES = 5

    def __init__(self) -> None:
        self.count = self._checksum = 0

    def note(self, lines: Iterable[str]) -> None:
        """A state was loaded, which ``lines`` describe."""
        self.count += 1
        self._checksum = zlib.crc32("\n".join(lines).encode(errors="replace"), self._checksum)

    def packed(self) -> bytes:
        """How many, and a checksum of all that was said of them."""
        return bytes([self.count % 256]) + self._checksum.to_bytes(self.NUM_BYTES - 1, "little")


class Edits:
    """What a script has changed of averaged gradients since the buckets were laid out.

    checksum: of all changes, in their order. missed: gradients that were no averages yet at a
        change since the last step, by bucket and slot.
    """

    NUM_BYTES = 4

    def __init__(self) -> None:
        self.checksum = 0
        self.missed: set[tuple[int, int]] = set()

    def note(self, line: str) -> None:
        """A gradient was changed, as ``line`` describes."""
        self.checksum = zlib.crc32(line.encode(errors="replace"), self.checksum)

    def packed(self) -> bytes:
        """A checksum of all changes, in their order."""
        return self.checksum.to_bytes(self.NUM_BYTES, "little")


@dataclass(frozen=True, slots=True)
class Answer:
    """What ranks have agreed on. used: for each bucket, a byte for each parameter, 0 if it had no
    gradient on any. unfilled: the buckets that backprop has not filled on some.
    """

    used: tuple[bytes, ...]
    unfilled: frozenset[int]


class StepAgreement:
    """One rank's, for one step: which parameters had a gradient here, which buckets travel, and
    which of them backprop has not filled. Also how often it has reduced gradients, what was changed
    of them, what its optimizer has loaded, and each param group's learning rate.

    active: the buckets that travel. unfilled: those of them that only the step has closed.
    num_reduced: times that gradients were reduced since the buckets were laid out.
    """

    def __init__(
        self,
        buckets: Sequence[BucketRuntime],
        active: Iterable[int],
        unfilled: Collection[int],
        num_reduced: int,
        edits: Edits,
        loads: Loads,
        options: Options,
    ) -> None:
        self._options = options
        self._missing = [(len(bucket.params), bucket.tracker.missing) for bucket in buckets]
        self._buckets, self._missed = buckets, frozenset(edits.missed)
        self._num_flags = sum(num for num, _ in self._missing) + len(buckets)
        self._active, self._unfilled = active, unfilled
        self._num_reduced, self._edits, self._loads = num_reduced, edits.packed(), loads.packed()

    @cached_property
    def packed(self) -> Tensor:
        """To be reduced in place to the largest of each number. Made when the progress thread first
        asks for it, of what held when the agreement was made: the main thread has better to do.
        """
        present = bytearray()
        for index, (num, missing) in enumerate(self._missing):
            first = len(present)
            present += bytes((_HAS_GRADIENT,)) * num
            for slot in missing:
                present[first + slot] = _NO_GRADIENT
            for bucket, slot in self._missed:
                if bucket == index:
                    present[first + slot] = _HAS_UNAVERAGED
        present += bytes(index in self._unfilled for index in range(len(self._missing)))
        alike = zlib.crc32(str(sorted(self._active)).encode()).to_bytes(_ACTIVE_BYTES, "little")
        alike += bytes([self._num_reduced % 256]) + self._edits + self._loads
        rates = [_as_number(_rate(group)) for group in self._options]
        compared = torch.tensor([*alike, *rates], dtype=torch.int16, device="cpu")
        flags = torch.frombuffer(present, dtype=torch.uint8).to(torch.int16)
        return torch.cat([flags, compared, -compared])

    def answer(self) -> Answer:
        """After the reduction. Raises ReplicaMismatchError if the ranks are not alike."""
        packed = bytes(self.packed[: self._num_flags].tolist())
        if (missed := packed.find(_HAS_UNAVERAGED)) >= 0:
            self._refuse_missed(missed)
        largest, of_negatives = self.packed[self._num_flags :].view(2, -1)
        most, least = largest.tolist(), (-of_negatives).tolist()
        if most != least:
            _compare_active(most[:_ACTIVE_BYTES], least[:_ACTIVE_BYTES])
            most, least = most[_ACTIVE_BYTES:], least[_ACTIVE_BYTES:]
            _compare_reductions(most[0], least[0])
            most, least = most[1:], least[1:]
            _compare_edits(most[: Edits.NUM_BYTES], least[: Edits.NUM_BYTES])
            most, least = most[Edits.NUM_BYTES :], least[Edits.NUM_BYTES :]
            self._compare_loads(most, least)
            self._compare_rates(most[Loads.NUM_BYTES :], least[Loads.NUM_BYTES :])
        used, first = [], 0
        for num, _ in self._missing:
            used.append(packed[first : first + num])
            first += num
        unfilled = packed[first:]
        return Answer(tuple(used), frozenset(i for i, some in enumerate(unfilled) if some))

    def _refuse_missed(self, number: int) -> None:
        name = [name for bucket in self._buckets for name in bucket.spec.names][number]
        raise ReplicaMismatchError(
            "gradients were changed or read before step(), but on some ranks a backward inside "
            f"no_sync() had left one of {name} that the last backward did not add to, so it was "
            "not averaged yet; to clip, call optimizer.clip_grad_norm_(), which averages it first; "
            "a script for DDP needs find_unused_parameters=True, without --gather parameters",
            code="gradient-not-averaged",
        )

    def _compare_loads(self, most: Sequence[int], least: Sequence[int]) -> None:
        if most[0] != least[0]:
            raise ReplicaMismatchError(
                f"since the buckets were laid out some ranks have called load_state_dict() "
                f"{least[0]} times and some {most[0]} times; load the same state on every rank, "
                "before the same step",
                code="ranks-loaded-different-states",
            )
        if most[: Loads.NUM_BYTES] != least[: Loads.NUM_BYTES]:
            raise ReplicaMismatchError(
                "ranks have loaded states that differ in hyperparameters, counts of steps, shapes "
                "or values; load the same state on every rank",
                code="ranks-loaded-different-states",
            )

    def _compare_rates(self, most: Sequence[int], least: Sequence[int]) -> None:
        for index, (high, low) in enumerate(zip(most, least, strict=True)):
            if high - low > 1:  # neighbours may be alike but for a rounding
                raise ReplicaMismatchError(
                    f"the learning rate of param group {index} is {_rate(self._options[index]):g} "
                    f"on this rank, and from about {_from_number(low):.4g} to "
                    f"{_from_number(high):.4g} over all; let every rank's scheduler see the same, "
                    "such as the mean over ranks of a loss. Where join() gives ranks unequal "
                    "numbers of batches, have it step equally often, by a count that all share",
                    code="ranks-differ-in-options",
                )


def _compare_active(most: Sequence[int], least: Sequence[int]) -> None:
    if most != least:
        raise ReplicaMismatchError(
            "ranks train different parameters in this step: in some buckets all have requires_grad "
            "False on one rank, and some have it on another. Freeze and unfreeze the same "
            "parameters on every rank, with one seed where they are drawn at random",
            code="ranks-freeze-differently",
        )


def _compare_reductions(most: int, least: int) -> None:
    if most != least:
        raise ReplicaMismatchError(
            "some ranks have reduced gradients once more than others by this step: their backwards "
            "before it differ. Agree on a step that is left out before its backward, or run that "
            "in no_sync() and drop it with zero_grad(); put no_sync() around all backwards of a "
            "step but the last, of which each rank may have any number",
            code="ranks-differ-in-backwards",
        )


def _compare_edits(most: Sequence[int], least: Sequence[int]) -> None:
    if most != least:
        raise ReplicaMismatchError(
            "ranks have changed gradients differently between backward and step(), such as by "
            "torch.nn.utils.clip_grad_norm_: by other factors, or of other parameters. Clip by the "
            "same number on every rank; a norm that takes in parameters of no "
            "DistributedOptimizer, or gradients that are None on some ranks, is none",
            code="ranks-change-gradients-differently",
        )


def _rate(group: Mapping[str, Any]) -> float:
    """A param group's learning rate; 0 for none, and on a device, which one would wait for."""
    rate = group.get("lr")
    if isinstance(rate, Tensor):
        return float(rate) if rate.device.type == "cpu" and rate.numel() == 1 else 0.0
    return float(rate) if isinstance(rate, (int, float)) else 0.0


def _as_number(rate: float) -> int:
    """The size of ``rate``; 0 for 0 and what is no number."""
    if not rate or not math.isfinite(rate):
        return 0
    return max(1, min(_LARGEST, _OF_ONE + round(_PER_DOUBLING * math.log2(abs(rate)))))


def _from_number(number: int) -> float:
    return 2.0 ** ((number - _OF_ONE) / _PER_DOUBLING) if number else 0.0
