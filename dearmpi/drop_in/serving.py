"""Serving: which engine averages which gradients of a wrapped model, with which settings.

A wrapper's parameters belong to its averager, an engine that never steps, until an optimizer has
taken its first step on them. Then an engine of the optimizer's takes over: its buckets are updated
behind the next forward.

Torch's hooks around steps make an optimizer known. Its first step is torch's own, on averaged
gradients; the next ones are an engine's. An optimizer that no engine can serve, such as LBFGS, goes
on stepping by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import Parameter, signature
from typing import Any, ClassVar
from weakref import WeakSet, ref

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import dearmpi
from dearmpi import DistributedOptimizer, World
from dearmpi.config import CommDtype, EngineConfig, EngineSettings
from dearmpi.drop_in.arguments import note
from dearmpi.drop_in.served_optimizer import (
    KnownOptimizers,
    ServedOptimizer,
    optimizers_of,
    params_of,
)
from dearmpi.errors import ConfigError, UsageError
from dearmpi.torch_internals import without_torch_function


class Chosen:
    """What holds in this process.

    choices: schedule, gather, comm_dtype and compress of every model that is wrapped from now on.
    is_served: whether scripts find dearmpi behind torch's names. sees_steps: whether torch's hooks
    around every optimizer's step are on.
    """

    choices: ClassVar[EngineConfig] = EngineConfig(gather="gradients")
    is_served: ClassVar[bool] = False
    sees_steps: ClassVar[bool] = False


_HALF_BYTES = 2  # of an element that is on the wire as it is


class ModelServing:
    """The engines of one wrapper.

    engines: of optimizers that have parameters of the wrapper. synchronizes: whether the next
    backward reduces gradients.

    The module that is wrapped keeps it alive, so that every rank has it when the module is wrapped
    once more. Copies of the module have None in its place.
    """

    def __init__(
        self, model: nn.Module, world: World, *, bucket_cap_mb: float | None, broadcasts: bool
    ) -> None:
        """``model``: the wrapper, whose trainable parameters of this moment are served."""
        self._model, self._world = model, world
        self.label = world.label("DistributedDataParallel")  # ranks make them in one order
        self._bucket_cap_mb, self._broadcasts = bucket_cap_mb, broadcasts
        self.comm_dtype: CommDtype = Chosen.choices.comm_dtype
        self.names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        if not self.names:
            raise ConfigError(
                "no parameter of the model requires grad: nothing to train; leave out "
                "DistributedDataParallel",
                code="nothing-to-train",
            )
        self.engines: list[ServedOptimizer] = []
        self.synchronizes = True
        self._averager: DistributedOptimizer | None = None
        self._unsynchronized = ExitStack()
        self._is_synchronizing = True
        self._is_complete = False
        self.note_storage()
        self._newer: ModelServing | None = None  # another wrapper's, with the same parameters
        self._buffers_differ = True  # as far as this process knows, in a model that has some
        self._has_trained = False  # since the model was wrapped, which makes buffers alike
        self._is_joined = False
        self._lacks_gradients = False  # of parameters that the next backward leaves out
        # Engines that have begun to average, whose gradients no step has used.
        self._averaging: WeakSet[DistributedOptimizer] = WeakSet()
        self._root = 0  # whose buffers count outside steps
        for older in KnownOptimizers.models_with(self.names):
            older.leave_to(self)
        watch_steps(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def leave_to(self, newer: ModelServing) -> None:
        """Leave all parameters to another wrapper of some of them (collective)."""
        self._leave_engines()
        self._newer = newer
        KnownOptimizers.models.discard(self)

    def prepare(self) -> None:
        """A forward begins, whose backward brings gradients (collective the first time).

        Raises UsageError where nothing averages some of the parameters.
        """
        if self._newer is not None:
            if not self.names.keys() <= self._newer.names.keys():
                raise UsageError(
                    "a part of a model in DistributedDataParallel was wrapped once more; wrap the "
                    "whole model again, or wrap separate parts",
                    code="parameter-taken",
                )
            self._newer.prepare()
            return
        self._unmark()
        if self._has_moved():
            self._leave_engines()  # as after model.to("cpu:0"): they start over where it is now
        if not self._is_complete:
            self._complete()
        if self._is_synchronizing is not self.synchronizes:
            self._switch()
        if self._is_joined:
            self.engines[0].engine.begin_forward()
        self.broadcast_buffers()
        self._has_trained = True
        self._buffers_differ = self._lacks_gradients = self.synchronizes
        if self.synchronizes:
            self._averaging.update(self._all_engines())

    def broadcast_buffers(self) -> None:
        """Before a forward, those of rank 0, unless they have come since the last one (collective).

        As with DDP, forwards inside ``no_sync`` leave them different until the next step.
        """
        if self._newer is not None:
            self._newer.broadcast_buffers()
            return
        differ, self._buffers_differ = self._buffers_differ, False
        if self._broadcasts and differ and not self._is_joined and self._has_buffers():
            dearmpi.broadcast_buffers(self._model, self._world, root=self._root)

    def prepare_evaluation(self) -> None:
        """A forward without gradients begins, perhaps on one rank alone: before all training, and
        after a step, all have the same buffers (collective where they differ).
        """
        if self._newer is not None:
            self._newer.prepare_evaluation()
            return
        self._unmark()
        if self._has_trained:
            self.broadcast_buffers()

    def note_wrapped(self) -> None:
        """The wrapper is made; its averager has copied rank 0's buffers."""
        self._has_trained = False

    def note_step(self, engine: DistributedOptimizer) -> None:
        """Steps use gradients, and those of some engines send the buffers."""
        self._averaging.discard(engine)
        if engine.config.buffers == "broadcast":
            self._buffers_differ = False

    @contextmanager
    def own_buffers(self) -> Iterator[None]:
        """Inside, an engine is made, which would copy those of rank 0 to ranks that keep theirs."""
        is_kept = not self._broadcasts
        kept = [(b, b.detach().clone()) for b in self._model.buffers()] if is_kept else []
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, values in kept:
                    buffer.copy_(values)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Inside, ranks may have unequal numbers of forwards (collective)."""
        follows = self._broadcasts and self._has_buffers()
        with self.only_engine().join(buffers_before_forward=follows):
            self._is_joined = True
            try:
                yield
            finally:
                self._is_joined = False
        self._buffers_differ = False
        self._root = self._world.size - 1  # as with DDP, whose join() stays on in this

    def keep_gradients(self, engine: DistributedOptimizer) -> None:
        """Have an engine show gradients as DDP does: where parameters may be unused, on all ranks
        what any has.
        """
        unused = vars(self._model).get("find_unused_parameters")
        engine.keep_gradients(self._complete_gradients if unused else None)

    def average_now(self) -> None:
        """Put averaged gradients, as plain tensors, where the averager's are (collective)."""
        averager = self._averager
        if averager is None:
            return
        self._averaging.discard(averager)
        found = averager.gradients()
        averager.zero_grad()
        for param, name in self.names.items():
            if name in found:
                param.grad = found[name]

    def stop_averager(self) -> None:
        """Leave its parameters to another engine, with what gradients they have (collective)."""
        self._unsynchronized.close()
        self._is_synchronizing, self._is_complete = True, False
        if self._averager is not None:
            self._averager.close()
            self._averager = None

    def only_engine(self) -> DistributedOptimizer:
        """The engine of the one optimizer that has all parameters, for ``join``.

        Raises UsageError where there is none.
        """
        for optimizer in optimizers_of(self.names) if not self.engines else ():
            serve(optimizer)
        if not self._is_complete:
            self._complete()
        if len(self.engines) != 1 or self._averager is not None:
            raise UsageError(
                f"join() needs one optimizer that has all parameters of the model, made before; "
                f"there are {len(self.engines)} that are served; make one with param groups, or "
                "give every rank as many batches",
                code="join-misused",
            )
        return self.engines[0].engine

    def choose_comm_dtype(self, dtype: CommDtype) -> None:
        """Send gradients in ``dtype`` from now on (collective).

        Raises UsageError once an optimizer is served.
        """
        if self.engines:
            raise UsageError(
                "register_comm_hook() after the first step; call it right after "
                "DistributedDataParallel()",
                code="ddp-not-served",
            )
        self.comm_dtype = dtype
        self.stop_averager()

    def take(self, served: ServedOptimizer) -> None:
        """Have an engine that has just been made."""
        self.engines.append(served)
        self.note_storage()
        self._buffers_differ &= not self._broadcasts  # engines begin with rank 0's

    def note_storage(self) -> None:
        """Parameters lie where an engine has put them."""
        self._addresses, self._places = _addresses_of(self.names), [p.detach() for p in self.names]

    def take_moved(self) -> None:
        """Before a step: what the script has put in the place of parameters counts.

        As sharpness-aware optimizers do by ``param.data = kept``.
        """
        if not self._has_moved():
            return
        self.wait()
        for param, place in zip(self.names, self._places, strict=True):
            if param.data_ptr() != place.data_ptr():
                place.copy_(param.detach())
                param.data = place

    def wait(self) -> None:
        """Wait until every parameter shows the last step."""
        for served in self.engines:
            served.engine.synchronize()

    def settings(self) -> EngineSettings:
        """Those of the next engine; steps of the first one exchange the model's buffers."""
        choices = Chosen.choices
        are_halves = all(param.dtype.itemsize == _HALF_BYTES for param in self.names)
        return EngineSettings(
            schedule=choices.schedule,
            gather=choices.gather,
            bucket_cap_mb=self._bucket_cap_mb,
            comm_dtype="fp32" if are_halves else self.comm_dtype,
            compress=choices.compress,
            buffers="broadcast" if self._broadcasts and not self.engines else "keep",
        )

    @property
    def model(self) -> nn.Module:
        """The wrapper."""
        return self._model

    def _complete(self) -> None:
        """Have an averager for what no engine has."""
        taken = {p for served in self.engines for p in served.params()}
        free = [p for p in self.names if p not in taken]
        if free and self._averager is None:
            never_stepped = torch.optim.SGD(free, lr=0.0)
            KnownOptimizers.own.add(never_stepped)
            settings = self.settings()
            settings |= EngineSettings(gather="gradients", buffers="keep")
            choices = Chosen.choices
            if choices.keeps_unsent or choices.compress == "auto":  # by steps, which it never takes
                settings |= EngineSettings(compress="none")
            with self.own_buffers(), self._world.named_call(f"{self.label}()"):
                self._averager = DistributedOptimizer(
                    never_stepped, self._model, world=self._world, **settings
                )
            self.keep_gradients(self._averager)
        self._is_complete = True
        self.note_storage()

    def _unmark(self) -> None:
        """Modules have readers of parameters wait from now on."""
        for served in self.engines:
            served.pending.unmark()

    def _has_moved(self) -> bool:
        return _addresses_of(self.names) != self._addresses

    def _leave_engines(self) -> None:
        for served in list(self.engines):
            served.release()
        self.stop_averager()

    def _complete_gradients(self) -> None:
        """The first backward after a forward has ended (collective)."""
        if self._lacks_gradients and not self._is_joined:
            self._lacks_gradients = False
            for engine in self._all_engines():
                if engine.config.gather == "gradients":
                    engine.complete_gradients()

    def _switch(self) -> None:
        self._unsynchronized.close()
        for engine in () if self.synchronizes else self._all_engines():
            if engine in self._averaging:  # backwards add to what no step has used
                self._averaging.discard(engine)
                engine.leave_gradients()
        if not self.synchronizes:
            for served in self.engines:
                self._unsynchronized.enter_context(served.no_sync())
            if self._averager is not None:
                self._unsynchronized.enter_context(self._averager.no_sync())
        self._is_synchronizing = self.synchronizes

    def _all_engines(self) -> Iterator[DistributedOptimizer]:
        yield from (served.engine for served in self.engines)
        if self._averager is not None:
            yield self._averager

    def _has_buffers(self) -> bool:
        return any(True for _ in self._model.buffers())


def _addresses_of(params: Iterable[nn.Parameter]) -> list[int]:
    with without_torch_function():  # which would wait
        return [param.data_ptr() for param in params]


def watch_steps(model: ModelServing) -> None:
    """See the steps of optimizers that have parameters of ``model``."""
    KnownOptimizers.models.add(model)
    if not Chosen.sees_steps:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        Chosen.sees_steps = True


def serve(optimizer: Optimizer) -> None:
    """Build the optimizer's engine, if one can serve it (collective)."""
    models = KnownOptimizers.models_of(optimizer)
    world = dearmpi.connect()
    known = {p for model in models for p in model.names}
    if not all(p in known or not p.requires_grad for p in params_of(optimizer)):
        _refuse(world, optimizer, "has parameters of no wrapped model")
        return
    closure = signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:  # as LBFGS: losses are its state
        _refuse(world, optimizer, "its step() needs a closure")
        return
    for model in models:
        model.stop_averager()
    try:
        served = ServedOptimizer(optimizer, models, world)
    except ConfigError as error:
        _refuse(world, optimizer, str(error))
        return
    KnownOptimizers.served[optimizer] = ref(served)
    for model in models:
        model.take(served)


def _refuse(world: World, optimizer: Optimizer, reason: str) -> None:
    KnownOptimizers.refused.add(optimizer)
    name = type(optimizer).__name__
    note(world, f"{name} steps by itself, with no communication behind the forward: {reason}")


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """A step that no engine takes finds averaged gradients."""
    if isinstance(optimizer, DistributedOptimizer) or optimizer in KnownOptimizers.served:
        return None
    models = KnownOptimizers.models_of(optimizer)
    if not models:
        return None
    wanted = set(params_of(optimizer))
    for model in models:
        for served in list(model.engines):
            if not wanted.isdisjoint(served.params()):
                _contest(served, optimizer)

    def average() -> None:
        for model in models:
            model.average_now()

    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        average()
        return None

    def evaluate() -> Any:
        loss = closure()
        average()
        return loss

    if len(args) > 1:
        return (args[0], evaluate, *args[2:]), kwargs
    return args, {**kwargs, "closure": evaluate}


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """The first step is over: the next ones are an engine's."""
    if isinstance(optimizer, DistributedOptimizer) or optimizer in KnownOptimizers.served:
        return
    if optimizer not in KnownOptimizers.refused and KnownOptimizers.models_of(optimizer):
        serve(optimizer)


def _contest(served: ServedOptimizer, optimizer: Optimizer) -> None:
    """Another optimizer steps on the same parameters: where they take turns, each by itself."""
    served.release()
    if optimizer in KnownOptimizers.released:
        KnownOptimizers.refused.update((served.optimizer, optimizer))
    KnownOptimizers.released.add(served.optimizer)
