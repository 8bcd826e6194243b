"""Averaged gradients as a script sees them between backward and step.

Each rank holds the averages of its own shards. A norm is summed over the ranks. Each rank makes a
change that treats every element by itself where it owns elements. Whole gradients are gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from dearmpi.engine import usage_errors
from dearmpi.engine.agreement.join import CLIP, GATHER, SEND, STEP
from dearmpi.engine.bucket.bucket import BucketRuntime, BucketState
from dearmpi.engine.bucket.buffers import shaped_like
from dearmpi.engine.iteration.backprop import Backprop
from dearmpi.engine.iteration.engine_state import EngineState
from dearmpi.engine.state.owned_state import gather_shards
from dearmpi.torch_internals import number_of_backprop

Place = tuple[int, int]


class ReducedGradients:
    """The gradients of one engine, which the placeholders in ``param.grad`` ask.

    The first norm of a type finds the norms of all parameters in one exchange.
    """

    def __init__(self, state: EngineState, backprop: Backprop) -> None:
        self._state, self._backprop = state, backprop
        self._norms: dict[float, dict[Place, float]] = {}
        self._are_changed = False  # since the last step
        self._num_reduced = 0  # when these norms were found
        self._awaits_gathers = any(bucket.travels_as_factors for bucket in state.buckets)
        for bucket in state.buckets:
            bucket.serve_placeholders(ref(self))

    def keep(self) -> None:
        """Serve whatever a script does to ``param.grad``, also after the step."""
        self._state.keeps_gradients = True
        for bucket in self._state.buckets:
            bucket.memory.keeps = True
            bucket.places = [param.detach() for param in bucket.params]

    def keeps_whole(self, *, now: bool) -> bool:
        """Whether gradients are kept; ``now``: and each rank has all of them."""
        iteration = self._state.iteration
        return self._state.keeps_gradients and (
            not now or iteration.stepped or iteration.gathers_early
        )

    def whole(self, bucket: int, slot: int) -> Tensor:
        """The whole averaged gradient as it lies in its buffer (collective before the step).

        Raises UsageError within a backward, and for a gradient that the step has used.
        """
        if self._state.iteration.stepped:
            self._refuse_in_backprop(self._state.buckets[bucket].spec.names[slot])
            self._backprop.wait_updated()
        else:
            self._settle(bucket, slot)
            self._wait_gathered()
        return self._state.buckets[bucket].gradients.views[slot]

    def changed(self, bucket: int, slot: int, how: str) -> None:
        """Ranks compare in the step what they have changed."""
        self.forget_norms()
        if not self._state.iteration.stepped:
            self._note(f"{self._state.buckets[bucket].spec.names[slot]} {how}")

    def lend(self, bucket: int) -> None:
        """Use other memory for the next gradients of ``bucket``."""
        self._state.buckets[bucket].memory.lent = True

    def take_replaced(self) -> None:
        """Before the step: what the script has put in the place of placeholders counts."""
        replaced = [(b, slot) for b in self._state.buckets for slot in b.replaced_slots()]
        if not replaced:
            return
        self._wait_gathered()
        for bucket, slot in replaced:
            bucket.take_replaced(slot)
            self.changed(bucket.index, slot, "replaced")

    def take_changed(self) -> None:
        """Before a further backward: the same, unless all are cleared, which drops them."""
        params = (param for bucket in self._state.buckets for param in bucket.params)
        if any(param.grad is not None for param in params):
            self.take_replaced()

    def complete(self) -> None:
        """After a backward that has left out some parameters: their averages show as well on ranks
        that have no gradient of them, where others have one (collective).
        """
        state, has_begun = self._state, not self._state.iteration.stepped
        self._backprop.end()
        places = [(b, slot) for b in state.buckets for slot in range(len(b.params))]
        own = [float(has_begun and b.params[slot].grad is not None) for b, slot in places]
        with state.world.named_call("the end of a backward with unused parameters"):
            some_begun, *some_have = state.world.all_reduce([float(has_begun), *own], "max")
        if not some_begun:
            return
        if not has_begun:
            self._backprop.begin()
        self._backprop.finish_backward()
        for (bucket, slot), has in zip(places, some_have, strict=True):
            if has and slot in bucket.tracker.expected:
                bucket.cover(slot)

    def withdraw(self, drop: Callable[..., None]) -> dict[nn.Parameter, Tensor]:
        """The averages, which are then dropped: backwards whose gradients stay local add to them
        (collective). Nothing where no rank has any that the step has not used.
        """
        has_begun = not self._state.iteration.stepped
        if has_begun:
            self._state.joining.refuse("no_sync() after a backward without step()")
        self._backprop.end()
        with self._state.world.named_call("the begin of no_sync() after a backward"):
            (some_begun,) = self._state.world.all_reduce([float(has_begun)], "max")
        if not some_begun:
            return {}
        if not has_begun:
            self._backprop.begin()
        self._backprop.finish_backward()
        if self._state.keeps_gradients:
            self.take_replaced()
        found = self._gather()
        drop(set_to_none=True)
        return found

    def hand_over(self) -> None:
        """At the end, the script gets what it has not read: gradients in place of placeholders."""
        kept = [(b, slot) for b in self._state.buckets for slot in b.kept_slots()]
        for bucket, slot in kept:
            param = bucket.params[slot]  # which the script may have converted since
            param.grad = self.whole(bucket.index, slot).to(param.device, param.dtype)

    def norm(self, bucket: int, slot: int, norm_type: float) -> float:
        """The norm of an averaged gradient, the same on every rank (collective).

        Raises UsageError on all ranks if some have no gradient of a parameter that others have.
        """
        unsent = self._find_unsent()
        self._settle(bucket, slot, notes_unsent=False)  # a norm is collective, and refuses it
        if self._state.joining.is_open:  # where each rank that still trains has all
            whole = self._state.buckets[bucket].gradients.views[slot]
            return float(torch.linalg.vector_norm(whole, norm_type))
        if self._num_reduced != self._state.num_reduced:
            self.forget_norms()
            self._num_reduced = self._state.num_reduced
        found = self._norms.get(norm_type)
        if found is None or (bucket, slot) not in found:
            found = self._norms[norm_type] = self._find_norms(norm_type, unsent)
        return found[bucket, slot]

    def change(
        self, bucket: int, slot: int, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Change an averaged gradient in place, by a method that treats each element by itself.

        Ranks compare in the step what they have changed.
        """
        self._settle(bucket, slot)
        runtime = self._state.buckets[bucket]
        if runtime.state is BucketState.GATHERED:
            getattr(runtime.gradients.views[slot], method)(*args, **kwargs)
        else:
            for own, piece in runtime.own_pieces():
                if own == slot:
                    getattr(piece, method)(*args, **kwargs)
        for found in self._norms.values():
            found.pop((bucket, slot), None)
        numbers = [_described(value) for value in (*args, *kwargs.values())]
        self._note(f"{runtime.spec.names[slot]} {method} {numbers}")

    def gather(self) -> dict[nn.Parameter, Tensor]:
        """Copies of the whole averaged gradients on every rank (collective).

        A parameter without gradient on any rank has none here.
        """
        self._state.joining.refuse("gathering gradients")
        with self._state.world.named_call("optimizer.gradients()"):
            return self._gather()

    def _gather(self) -> dict[nn.Parameter, Tensor]:
        if self._state.keeps_gradients:  # as a rank does that has read some before
            self._wait_gathered()
        else:
            self.wait()
        buckets = self._state.buckets
        flags = [slot not in b.tracker.missing for b in buckets for slot in range(len(b.params))]
        active = [b.index in self._state.iteration.active for b in buckets for _ in b.params]
        flat_flags = [
            float(has and is_active) for has, is_active in zip(flags, active, strict=True)
        ]
        has_any = iter(self._state.world.all_reduce(flat_flags, "max"))
        gathered: dict[nn.Parameter, Tensor] = {}
        for bucket in buckets:
            present = [slot for slot in range(len(bucket.params)) if next(has_any)]
            flat = self._whole(bucket) if present else None
            for slot in present:
                param, start = bucket.params[slot], bucket.spec.placements[slot].start
                assert flat is not None
                gathered[param] = shaped_like(param.detach(), flat, start).clone()
        return gathered

    def forget_norms(self) -> None:
        """All gradients have changed."""
        self._norms.clear()

    def wait(self) -> None:
        """Until shards have averages, or where these are factors, until they are gathered."""
        if self._awaits_gathers:
            self._backprop.wait_gathered()
        else:
            self._backprop.wait_reduced()

    def _settle(self, bucket: int, slot: int, *, notes_unsent: bool = True) -> None:
        """Wait until the gradients are averaged. Raises UsageError for one that ``step`` has used,
        and inside ``join``. One that stayed local, and that a script takes for an average, the step
        refuses on all ranks: others may have none to refuse.
        """
        runtime, iteration = self._state.buckets[bucket], self._state.iteration
        self._refuse_in_backprop(runtime.spec.names[slot])
        if self._state.joining.is_open and not self._state.keeps_gradients:
            raise usage_errors.clipped_in_join()
        if iteration.stepped or slot not in runtime.tracker.covered:
            raise usage_errors.used_up(runtime.spec.names[slot])
        if notes_unsent and (place := self._find_unsent()) is not None:
            self._state.edits.missed.add(place)
        if self._state.joining.is_open:
            self._wait_gathered()
        else:
            self.wait()

    def _refuse_in_backprop(self, name: str) -> None:
        if number_of_backprop() >= 0:
            raise usage_errors.read_in_backprop(name)

    def _wait_gathered(self) -> None:
        if not self._state.iteration.gathers_early:  # ranks without batches have to follow
            self._state.joining.announce_next(GATHER)
            self._state.world.begin_read()
        self._backprop.wait_gathered()

    def _note(self, line: str) -> None:
        self._state.edits.note(line)
        self._are_changed = True

    def send_changed(self) -> None:
        """Inside ``join``: ranks without batches get gradients that this one has changed."""
        changed, self._are_changed = self._are_changed, False
        if changed and self._state.joining.is_open:
            self._state.joining.announce_next(SEND, self._state.edits.checksum)
            self._broadcast_changed()

    def announce_step(self) -> None:
        """Inside ``join``: this rank is about to step."""
        self.send_changed()
        self._state.joining.announce_next(STEP)

    def follow(self) -> tuple[float, float] | None:
        """On a rank without batches: do as the others until they clip, to a norm of a type, or step
        (collective).
        """
        while True:
            kind, first, second = self._state.joining.find_next()
            if kind == GATHER:
                self._backprop.wait_gathered()
            elif kind == SEND:
                self._state.edits.checksum = int(first)
                self._broadcast_changed()
            else:
                return (first, second) if kind == CLIP else None

    def _broadcast_changed(self) -> None:
        for index in sorted(self._state.iteration.active):
            self._state.joining.broadcast_changed(self._state.buckets[index].gradients.data)

    def _find_unsent(self) -> Place | None:
        """Of a parameter whose gradient of before the last backward is not on its way."""
        if len(self._state.iteration.started) == len(self._state.iteration.active):
            return None
        for bucket in self._state.buckets:
            for slot in bucket.tracker.expected:
                grad = bucket.params[slot].grad
                if grad is not None and grad is not bucket.placeholders[slot]:
                    return bucket.index, slot
        return None

    def _find_norms(self, norm_type: float, unsent: Place | None) -> dict[Place, float]:
        """Norms of all averaged gradients, by bucket and slot (collective). ``unsent``: one that is
        not averaged, which torch would take as it is.
        """
        buckets = self._state.buckets
        places = [(b.index, slot) for b in buckets for slot in range(len(b.params))]
        parts = self._own_parts(norm_type)
        own = [parts.get(place, _NOTHING.get(norm_type, 0.0)) for place in places]
        has = [float(slot in buckets[index].tracker.covered) for index, slot in places]
        lacks = [1.0 - flag for flag in has]
        is_local = [float(place == unsent) for place in places]
        # Beside the largest, which MPI promises of numbers alone, NaN is a flag.
        is_nan = [float(math.isnan(part)) for part in own]
        is_largest = math.isinf(norm_type)
        if is_largest:
            own = [-math.inf if math.isnan(part) else part for part in own]
        with self._state.world.named_call(
            "a norm of averaged gradients, as clip_grad_norm_() asks for"
        ):
            flat = self._state.world.all_reduce(
                own + has + lacks + is_nan + is_local, "max" if is_largest else "sum"
            )
        num = len(places)
        sums, has, lacks, is_nan, is_local = (
            flat[first : first + num] for first in range(0, 5 * num, num)
        )
        for place, some_have, some_lack, one_is in zip(places, has, lacks, is_local, strict=True):
            name = buckets[place[0]].spec.names[place[1]]
            if one_is:
                raise usage_errors.still_local(name)
            if some_have and some_lack:
                raise usage_errors.lacking_on_some_ranks(name)
        if is_largest:
            sums = [math.nan if flag else one for one, flag in zip(sums, is_nan, strict=True)]
        return dict(zip(places, _as_norms(sums, norm_type), strict=True))

    def _own_parts(self, norm_type: float) -> dict[Place, float]:
        """What this rank's elements of each gradient contribute to its norm."""
        places, parts = [], []
        for index in sorted(self._state.iteration.active):
            bucket = self._state.buckets[index]
            for slot, piece in bucket.own_pieces():
                places.append((index, slot))
                # A norm of halves may be beyond the range of halves.
                wide = torch.promote_types(piece.dtype, torch.float32)
                parts.append(torch.linalg.vector_norm(piece, norm_type, dtype=wide).double())
        if not parts:
            return {}
        stacked = torch.stack(parts)
        if norm_type and math.isfinite(norm_type):
            stacked = stacked**norm_type
        elif norm_type == -math.inf:
            stacked = -stacked  # the largest is reduced
        return dict(zip(places, stacked.tolist(), strict=True))  # a device is waited for once

    def _whole(self, bucket: BucketRuntime) -> Tensor:
        """All averaged gradients of a bucket, as they lie in its flat buffer (collective)."""
        if bucket.state is BucketState.GATHERED:
            return bucket.gradients.data
        flat = torch.zeros_like(bucket.gradients.data)
        first, _ = bucket.spec.shard_range(self._state.world.rank)
        flat[first : first + len(bucket.gradients.shard)] = bucket.gradients.shard
        gather_shards(self._state.world, flat, bucket.spec.cuts)
        return flat


# What a rank without elements contributes, where it is not 0.
_NOTHING = {-math.inf: -math.inf}


def _as_norms(sums: list[float], norm_type: float) -> list[float]:
    if norm_type == -math.inf:
        return [-one for one in sums]
    if math.isinf(norm_type) or not norm_type:
        return sums
    norms: list[float] = (torch.tensor(sums, dtype=torch.float64) ** (1.0 / norm_type)).tolist()
    return norms


def _described(value: Any) -> str:
    """As text that other ranks can compare; a number on a device, for which one would wait, is left
    out.
    """
    if isinstance(value, Tensor):
        return repr(value.item()) if value.device.type == "cpu" else "a number"
    return repr(value)
