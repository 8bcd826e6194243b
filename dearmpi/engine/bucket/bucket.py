"""Bucket at run time: its buffers, what becomes of gradients in them, and its state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto
from itertools import compress
from operator import attrgetter
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor, nn

from dearmpi.config import LEAST_COMPRESSED, EngineConfig
from dearmpi.device.accelerator import DeviceEvent
from dearmpi.engine import usage_errors
from dearmpi.engine.bucket.buffers import (
    Arena,
    FlatBuffer,
    GradientMemory,
    give_back_freed,
    shaped_like,
)
from dearmpi.engine.bucket.grad_tracker import GradState, GradTracker, quiet_slots
from dearmpi.engine.bucket.placeholder import (
    AveragedGradients,
    GradPlaceholder,
    held_elsewhere,
)
from dearmpi.plan.data.layout import Bucket, BucketLayout
from dearmpi.torch_internals import copy_each, versions_of


class BucketState(Enum):
    """Where a bucket is in its iteration.

    With ``gather="parameters"`` a bucket goes IDLE, READY, REDUCING, REDUCED, UPDATING, UPDATED,
    GATHERING, GATHERED, IDLE; with ``gather="gradients"`` the update follows the gather.
    """

    IDLE = auto()  # parameters are current; gradients may be arriving
    READY = auto()  # every gradient is in the buffer
    REDUCING = auto()
    REDUCED = auto()  # the own shard holds averaged gradients
    UPDATING = auto()
    UPDATED = auto()
    GATHERING = auto()
    GATHERED = auto()


# From each to which others a bucket may go.
LEGAL = {
    BucketState.IDLE: {BucketState.READY},
    BucketState.READY: {BucketState.REDUCING},
    BucketState.REDUCING: {BucketState.REDUCED},
    BucketState.REDUCED: {BucketState.UPDATING, BucketState.GATHERING, BucketState.IDLE},
    BucketState.UPDATING: {BucketState.UPDATED},
    BucketState.UPDATED: {BucketState.GATHERING, BucketState.IDLE},
    BucketState.GATHERING: {BucketState.GATHERED},
    BucketState.GATHERED: {BucketState.UPDATING, BucketState.IDLE},
}

_LEAST_COMPRESSED = LEAST_COMPRESSED

# Of gradients that are copied together: few enough for them to be in a processor's cache still.
_COPIED_BYTES = 1 << 20

# Called for each parameter in each iteration: without a function of Python's.
_ADDRESS, _REQUIRES_GRAD = Tensor.data_ptr, attrgetter("requires_grad")


class BucketRuntime:
    """One bucket while training.

    index: number of the bucket, in feed-forward order. memory: where its gradients lie.
    pending: the parameters do not show the last step yet.
    tracker: which of its gradients have come.
    unread: no reader has waited for the parameters since they were last pending. A compiled graph
        holds only while all parameters that it reads are read.
    unread_slots: while it is ``unread``, parameters that were read before, and whose gradients have
        not come since: a graph from before may bring them.
    unguarded: a reader of the parameters may not wait: a compiled graph, or a module that has taken
        one over. So ``step`` waits.
    mark: on a device, the event for which the stream of a reader waits; None once it has passed.
    placeholders: what each parameter has for its gradient while that is under way.
    frozen_kept: frozen slots with a gradient that the script has not cleared, at the start of an
        iteration: as in torch, steps go on using it. None where gradients end with the step.
    held_on: on a device, the stream that made the gradients which are taken and not stored yet.
    shown: of compressed parameters, what replicas show of the own shard; None of others.
    owed: averages that ranks had not sent, for the next step: of the own shard, or with
        ``gather="gradients"`` of the whole bucket.
    counts_owed: the reduced gradients have ``owed`` in them; it lasts until an update uses them.
    travels_as_factors: until gradients are gathered, the own shard holds factors, which have their
        norm, and no elements.
    places: where updates write, where what the script puts in a parameter's place is taken over.
    keeps_unused: whether what arrives of a parameter that no rank uses waits for its next use; not
        of estimates, which are no part of a gradient.
    loss_scale: by what a loss is multiplied, and so gradients until they are unscaled.
    streams: on a device, all streams that have written gradients since the iteration began.

    One thread at a time writes: the main thread until the reduce-scatter is submitted, then the
    progress thread until ``reset``. Both write ``pending``, which the main thread sets and the
    progress thread clears, and ``mark``, the other way round; ``unread`` is the main thread's.
    """

    def __init__(
        self,
        spec: Bucket,
        params: Sequence[nn.Parameter],
        *,
        rank: int,
        gradients: Arena,
        parameters: Arena | None,
    ) -> None:
        """``parameters``: where they move to; None to leave them where they are."""
        self.spec = spec
        self.index = spec.index
        self.params = tuple(params)
        self._rank = rank
        self.memory = GradientMemory(spec, self.params, rank=rank, arena=gradients)
        self.parameters = None if parameters is None else self._make_room(parameters)
        self.state = BucketState.IDLE
        self.shown: Tensor | None = None
        self.owed: Tensor | None = None
        self.counts_owed = False
        self.travels_as_factors = False
        self.keeps_unused = False
        self.places: list[Tensor] = []
        self.loss_scale = 1.0
        self.pending = self.unread = False
        self.unread_slots: frozenset[int] = frozenset()
        self._changed: Sequence[nn.Parameter] = ()  # by the last update
        self._versions: list[int] = []  # of these, then
        nbytes = [param.nbytes for param in self.params]
        quiet = quiet_slots(nbytes, copied_bytes=_COPIED_BYTES)
        self.tracker = GradTracker(spec.names, quiet=quiet)
        self.unguarded = False
        self.mark: DeviceEvent | None = None
        self.held_on: Any = None
        self.streams: set[Any] = set()
        self._held: list[tuple[int, Tensor]] = []
        self._copied_at = frozenset(range(len(self.params))) - quiet
        self._carried: Tensor | None = None
        if self.parameters is not None:
            self._move_parameters(self.parameters)
        self._addresses = [param.data_ptr() for param in self.params]
        self._lacking: list[int] = []
        self.frozen_kept: list[int] = []
        self._served_by: ReferenceType[AveragedGradients] | None = None
        self.placeholders = tuple(
            GradPlaceholder.of(param, name)
            for param, name in zip(self.params, spec.names, strict=True)
        )

    def is_compressed(self, config: EngineConfig) -> bool:
        """Whether it is to be: it travels, is of fp32 or wider, and large enough to matter."""
        spec = self.spec
        is_wide = spec.dtype in ("float32", "float64")
        travels = spec.trained and spec.world_size > 1
        is_large = spec.padded_numel >= _LEAST_COMPRESSED
        return config.compress != "none" and travels and is_wide and is_large

    def keep_shown(self) -> None:
        """From now on ``shown`` is kept: parameters are gathered compressed."""
        assert self.parameters is not None
        self.shown = torch.empty_like(self.parameters.shard)

    def shown_of(self, slot: int) -> Tensor | None:
        """``shown`` of a parameter that lies whole in the own shard, in its shape."""
        if self.shown is None:
            return None
        first, _ = self.spec.shard_range(self._rank)
        start = self.spec.placements[slot].start - first
        return shaped_like(self.params[slot].detach(), self.shown, start)

    def add_owed(self, averages: Tensor) -> None:
        """Count ``averages``, of the own shard or of all, in the next step."""
        self.owed = averages.clone() if self.owed is None else self.owed.add_(averages)

    def take_carried(self) -> Tensor | None:
        """Averages of the own shard from an earlier backprop; the caller is to count them."""
        carried, self._carried = self._carried, None
        return carried

    @property
    def gradients(self) -> FlatBuffer:
        """The gradients' flat buffer, which need not be the same in each iteration."""
        return self.memory.buffer

    def own_pieces(self) -> Iterator[tuple[int, Tensor]]:
        """The elements that this rank owns of each parameter's gradient, with its slot."""
        first, last = self.spec.shard_range(self._rank)
        for slot, placed in enumerate(self.spec.placements):
            start, stop = max(first, placed.start), min(last, placed.stop)
            if start < stop:
                yield slot, self.gradients.shard[start - first : stop - first]

    def is_current(self) -> bool:
        """Whether the parameters show the last step."""
        return not self.pending

    def move_to(self, state: BucketState) -> None:
        """Change state; only as ``LEGAL`` allows."""
        assert state in LEGAL[self.state], f"bucket {self.index}: {self.state} to {state}"
        self.state = state

    def expect_gradients(self, *, quietly: bool) -> bool:
        """Start an iteration, in which the gradients of all parameters that require grad now are
        expected, beside what ``frozen_kept`` have; True if there are any.
        """
        expected = compress(range(len(self.params)), map(_REQUIRES_GRAD, self.params))
        self._check_frozen()
        self.frozen_kept = self._find_frozen_kept()
        self.tracker.expect((*expected, *self.frozen_kept), quietly=quietly)
        self._blank_frozen()
        return bool(self.tracker.expected)

    def _find_frozen_kept(self) -> list[int]:
        if not self.memory.keeps:
            return []
        frozen = [slot for slot, param in enumerate(self.params) if not param.requires_grad]
        grads = [(slot, self.params[slot].grad) for slot in frozen]
        return [s for s, g in grads if g is not None and g is not self.placeholders[s]]

    def keep_gradient(self, slot: int) -> None:
        """Accumulate locally: ``param.grad`` becomes a view, into which autograd then adds."""
        param, view = self.params[slot], self.gradients.views[slot]
        grad = self._usable_gradient(slot)
        if not _is_same(grad, view):
            view.copy_(grad)
            param.grad = view

    def take_gradient(self, slot: int) -> bool:
        """Take ``param.grad`` away; True if it was the last one, and all are in the buffer."""
        if self.tracker.states[slot] is GradState.READY:
            self.store_gradients()
            self.gradients.views[slot].add_(self._swap_gradient(slot))
        else:
            taken = [self._swap_gradient(slot)]
            if not self.memory.adopt(taken):
                self._held.append((slot, taken[0]))
        is_last = self.tracker.arrive(slot)
        if is_last or slot in self._copied_at:
            self.store_gradients()
        return is_last

    def collect_gradients(self) -> None:
        """Take the gradients that have come quietly: at once, in little Python for each."""
        params = self.params
        # Of one that was frozen meanwhile nothing has come.
        slots = [slot for slot in self.tracker.take_noted() if params[slot].requires_grad]
        self._held += [(slot, self._swap_gradient(slot)) for slot in slots]
        self.tracker.arrive_noted(slots)

    def uncover(self, slot: int) -> None:
        """Autograd is about to accumulate, and must not add to a placeholder."""
        param = self.params[slot]
        if param.grad is self.placeholders[slot] and param.requires_grad:
            param.grad = None

    def store_gradients(self) -> None:
        """Copy what has been taken into the buffer: small ones in one call, which is one of a
        device too, but uses little of it for a large one.
        """
        if not self._held:
            return
        held, self._held = self._held, []
        places = self.gradients.views
        views, grads = [], []
        for slot, grad in held:
            view = places[slot]
            if grad.nbytes >= _COPIED_BYTES:
                view.copy_(grad)  # nothing, where ``no_sync`` has kept it there
            elif grad is not view:
                views.append(view)
                grads.append(grad)
        if views:
            copy_each(views, grads)

    def close_gradients(self) -> None:
        """No more gradients will come: accumulated ones count, and the rest are zero."""
        self.tracker.take_noted()  # they count as accumulated
        for slot, (param, view) in enumerate(zip(self.params, self.gradients.views, strict=True)):
            if self.tracker.states[slot] is GradState.READY:
                continue
            if param.grad is None or param.grad is self.placeholders[slot]:
                view.zero_()
            else:
                self.take_gradient(slot)
        self.store_gradients()
        self.tracker.close()

    def release_gradients(self) -> None:
        """Take the placeholders away."""
        params, placeholders = self.params, self.placeholders
        for slot in self.tracker.covered:
            param = params[slot]
            if param.grad is placeholders[slot]:
                param.grad = None
        self.tracker.release()

    def keep_gradients(self) -> None:
        """In ``release_gradients``' place: placeholders stay, for a script to read."""
        missing = self.tracker.missing
        self._lacking = [slot for slot in missing if self.params[slot].grad is None]
        self.tracker.release()

    def add_to_kept(self, used: bytes | None) -> None:
        """A backprop is about to add to what the last step has left, of ``used`` parameters; those
        that lack a gradient on this rank alone have the average as well.
        """
        lacking = [slot for slot in self._lacking if used is not None and used[slot]]
        for slot in (*self.kept_slots(), *lacking):
            self.params[slot].grad = self.gradients.views[slot].clone()

    def forget_cleared(self) -> None:
        """Where gradients are kept, what is None now is no gradient of zero any more."""
        self.tracker.forget(slot for slot, param in enumerate(self.params) if param.grad is None)

    def kept_slots(self) -> list[int]:
        """Slots whose parameter has its placeholder, of this iteration or kept from the last."""
        pairs = zip(self.params, self.placeholders, strict=True)
        return [slot for slot, (param, kept) in enumerate(pairs) if param.grad is kept]

    def replaced_slots(self) -> list[int]:
        """Slots in whose placeholder's place the script has put something else, or None."""
        params, placeholders = self.params, self.placeholders
        return [
            slot for slot in self.tracker.covered if params[slot].grad is not placeholders[slot]
        ]

    def take_replaced(self, slot: int) -> None:
        """What the script has put in a placeholder's place counts instead of the average."""
        grad = self.params[slot].grad
        self._renew_placeholders(held_elsewhere(self.placeholders, [slot]))
        if self.memory.lent:
            whole = self.gradients.data
            self.memory.renew()
            self.gradients.data.copy_(whole)
        if grad is None:  # a further backprop adds to it
            self.gradients.views[slot].zero_()
        else:
            self.gradients.views[slot].copy_(self._usable_gradient(slot))
        self.tracker.withdraw(slot, is_missing=grad is None)

    def cover(self, slot: int) -> None:
        """Show the average of a gradient that this rank has none of."""
        if self.params[slot].grad is None:
            self.params[slot].grad = self.placeholders[slot]
            self.tracker.cover(slot)

    def serve_placeholders(self, gradients: ReferenceType[AveragedGradients]) -> None:
        """Have all placeholders ask ``gradients``."""
        self._served_by = gradients
        for slot, placeholder in enumerate(self.placeholders):
            placeholder.serve_from(gradients, self.index, slot)

    def renew_placeholders(self) -> None:
        """Where the script holds a placeholder of the last iteration, it keeps what that shows."""
        self._renew_placeholders(held_elsewhere(self.placeholders, range(len(self.params))))

    def _renew_placeholders(self, held: Sequence[int]) -> None:
        if held:
            renewed = list(self.placeholders)
            for slot in held:
                renewed[slot].stay(self.gradients.views[slot])
                renewed[slot] = GradPlaceholder.of(self.params[slot], self.spec.names[slot])
            self.placeholders = tuple(renewed)
            self.memory.lent = True
            if self._served_by is not None:
                self.serve_placeholders(self._served_by)

    def invalidate_params(self) -> None:
        """Bump version counters, so that a backward through an older graph raises instead of using
        stale values.

        Updates write past torch's count of changes, which a view in ``param.data`` does not share.
        """
        changed: Sequence[nn.Parameter] = self.params
        missing = self.tracker.missing
        self.unread_slots = self.unread_slots & missing if self.unread else missing
        if missing:
            changed = [param for slot, param in enumerate(changed) if slot not in missing]
        torch.autograd.graph.increment_version(changed)
        self._changed, self._versions = changed, versions_of(changed)

    def find_written(self) -> str:
        """The name of a parameter that was changed in place since ``invalidate_params``; empty if
        none was.
        """
        now = versions_of(self._changed)
        if now == self._versions:
            return ""
        both = zip(self._changed, now, self._versions, strict=True)
        written = next(param for param, version, before in both if version != before)
        names = zip(self.params, self.spec.names, strict=True)
        return next(name for param, name in names if param is written)

    def find_cleared(self) -> str:
        """The name of a parameter whose placeholder somebody else took away; empty if none is gone.

        ``model.zero_grad()`` does so, and means to drop gradients that are on their way already.
        """
        tracker = self.tracker
        for slot in tracker.noted:  # of a backprop that was broken off
            if self.params[slot].grad is None:
                return self.spec.names[slot]
        params, placeholders = self.params, self.placeholders
        for slot in tracker.covered:
            if params[slot].grad is not placeholders[slot]:
                return self.spec.names[slot]
        return ""

    def average(self) -> None:
        """Turn the own shard's sum into the mean, plus what an earlier backprop left, and what is
        owed: clipping has to see that as well.
        """
        shard = self.gradients.shard.div_(self.spec.world_size)
        if self._carried is not None:
            shard.add_(self._carried)
            self._carried = None
        if self.owed is not None and not (self.counts_owed or self.travels_as_factors):
            own = self.owed
            if self.parameters is None:  # what is owed is of the whole bucket, with its padding
                own = own[: self.spec.numel][slice(*self.spec.shard_range(self._rank))]
            shard[: len(own)].add_(own.to(shard), alpha=self.loss_scale)
            self.counts_owed = True

    def fill_nan(self) -> None:
        """Fill what other ranks own of the parameters with NaN, until the gather brings it.

        Not of frozen ones: with eager updates backprop may still go through them.
        """
        assert self.parameters is not None
        if not self.parameters.data.is_floating_point() or self.shown is not None:
            return  # to what is compressed differences are added
        first, last = self.spec.shard_range(self._rank)
        for slot, placed in enumerate(self.spec.placements):
            if self.params[slot].requires_grad:
                for start, stop in (
                    (placed.start, min(placed.stop, first)),
                    (max(placed.start, last), placed.stop),
                ):
                    self.parameters.data[start : max(start, stop)].fill_(float("nan"))

    def reopen(self) -> Tensor:
        """Accept gradients of a further backprop. Returns a copy of what is reduced already, which
        is added when the new gradients are reduced.
        """
        self._carried = self.gradients.shard.clone()
        if self.memory.keeps:
            self.memory.renew()
        self._blank_frozen()
        self.tracker.reopen()
        self.move_to(BucketState.IDLE)
        return self._carried

    def reset(self) -> None:
        """Back to the start of an iteration."""
        self.memory.give_up()
        self.tracker.reset()
        self.counts_owed = False
        self.move_to(BucketState.IDLE)

    def check_storage(self) -> None:
        """Raise UsageError if a parameter was moved out of the storage it had at the start."""
        if list(map(_ADDRESS, self.params)) == self._addresses:
            return
        for slot, (param, address) in enumerate(zip(self.params, self._addresses, strict=True)):
            name = self.spec.names[slot]
            if param.data_ptr() != address and not self._take_back(slot):
                is_shared = param.device.type == "cpu" and param.is_shared()
                raise usage_errors.shared(name) if is_shared else usage_errors.moved(name)

    def _take_back(self, slot: int) -> bool:
        """Where gradients are kept: what the script has put in a parameter's place goes there, as
        where a momentum encoder sets ``param.data``. False if it does not fit, or none is known.
        """
        param, places = self.params[slot], self.places
        if not places or param.is_shared():
            return False
        place = places[slot].data  # of another version: graphs have saved the parameter
        if (param.shape, param.dtype, param.device) != (place.shape, place.dtype, place.device):
            return False
        place.copy_(param.detach())
        param.data = place
        return True

    def _check_frozen(self) -> None:
        """Raise UsageError for a gradient that was kept of what is frozen by now: whether a bucket
        travels cannot depend on it, since other ranks may have none.
        """
        if (kept := self.memory.made) is None:
            return
        for slot, param in enumerate(self.params):
            if not param.requires_grad and _is_same(param.grad, kept.views[slot]):
                raise usage_errors.frozen_with_gradient(self.spec.names[slot])

    def _blank_frozen(self) -> None:
        """Zero what no backprop writes and MPI may have written: norms are of whole shards."""
        if 0 < len(self.tracker.expected) < len(self.params):
            for slot in self.tracker.frozen:
                self.gradients.views[slot].zero_()

    def _move_parameters(self, room: FlatBuffer) -> None:
        """Have the parameters, with their values, lie in ``room`` from now on."""
        for param, view in zip(self.params, room.views, strict=True):
            view.copy_(param.detach())
            param.data = view

    def _make_room(self, arena: Arena) -> FlatBuffer:
        likes = [param.detach() for param in self.params]
        return FlatBuffer(self.spec, arena.take(self.spec, likes[0]), likes, rank=self._rank)

    def _swap_gradient(self, slot: int) -> Tensor:
        """``param.grad``, whose place a placeholder takes."""
        param = self.params[slot]
        grad = param.grad
        if grad is None or grad.layout is not torch.strided or grad.requires_grad:
            grad = self._usable_gradient(slot)
        param.grad = self.placeholders[slot]
        return grad

    def _usable_gradient(self, slot: int) -> Tensor:
        grad = self.params[slot].grad
        if grad is None:
            raise usage_errors.taken(self.spec.names[slot])
        if grad.layout is not torch.strided:
            raise usage_errors.sparse(self.spec.names[slot])
        return grad.detach() if grad.requires_grad else grad  # which create_graph=True makes it do


def build_buckets(
    layout: BucketLayout, params: Mapping[str, nn.Parameter], *, rank: int, moves: bool
) -> list[BucketRuntime]:
    """The buckets of ``layout``; ``params``: by name. ``moves``: into flat buffers."""
    gradients = Arena(layout)
    parameters = Arena(layout, zeroed=False) if moves else None
    buckets = [
        BucketRuntime(
            bucket,
            [params[name] for name in bucket.names],
            rank=rank,
            gradients=gradients,
            parameters=parameters,
        )
        for bucket in layout
    ]
    give_back_freed()  # what the parameters have moved out of
    return buckets


def _is_same(grad: Tensor | None, view: Tensor) -> bool:
    return grad is not None and grad.data_ptr() == view.data_ptr()
