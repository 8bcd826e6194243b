"""DistributedOptimizer: what a training script sees of dearmpi."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dearmpi.comm.world import World
from dearmpi.config import EngineConfig, EngineSettings
from dearmpi.engine.iteration.compilation import untraced
from dearmpi.engine.readings import Readings
from dearmpi.engine.scaling import clip, follow_clips, scale
from dearmpi.engine.setup.context import TrainingContext
from dearmpi.engine.setup.plan_controller import choose_controller
from dearmpi.engine.state.sharded_state import LocalState
from dearmpi.guessed import SETTINGS, answers_guesses
from dearmpi.plan.data.plan import Plan

# Called with each new optimizer and its model, on all ranks alike: what records a script.
CONSTRUCTED: list[Callable[[DistributedOptimizer, nn.Module], None]] = []


class DistributedOptimizer(Readings):
    """An optimizer whose gradients are averaged over all ranks while the model computes.

    Use it as the ``optimizer`` it wraps: ``zero_grad``, backward, ``step``, schedulers. Rank 0's
    parameters and buffers are copied to all ranks at the start. After ``step`` parameters may be
    under way; a read through the model waits for them. References to parameters kept
    elsewhere need ``synchronize()`` first.
    """

    @answers_guesses("DistributedOptimizer", SETTINGS)
    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        world: World | None = None,
        config: EngineConfig | None = None,
        plan: Plan | Literal["auto"] | str | Path | None = None,
        **settings: Unpack[EngineSettings],
    ) -> None:
        """Take settings by name, as ``EngineConfig`` has them, else its defaults.

        plan: which parameters share a bucket and in what order buckets travel: a Plan, the file of
            one, or ``auto`` to profile the first few iterations, plan, and go on by that; best
            with ``eager=True``.
        world: the ranks to train on; None: those of ``connect``.
        config: settings in one object; a setting given by name wins.

        Raises ConfigError for a setting, plan, parameter or optimizer that cannot be served, and
        MismatchError if the ranks' models or settings differ.
        """
        context = TrainingContext.of(optimizer, model, world=world, plan=plan)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._optimizer, self._ranges = optimizer, context.ranges
        self.world, self.spans = context.world, context.spans
        try:
            self._controller = choose_controller(
                context, config=config, settings=settings, plan=plan
            )
        except BaseException:
            self.world.end_training(context.training)  # nobody has this one, to close it
            raise
        self._show()
        # In errors about collective calls; counted once all ranks have made it.
        self._name = self.world.label("optimizer")
        for observe in tuple(CONSTRUCTED):
            observe(self, model)

    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take an optimizer step; returns before it is finished. Options are read now."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._live.check_stepper()
        self._check_shared()
        self._ranges.follow()
        self._built.engine.step()
        self._mark_stepped()
        self._after_step()
        if self._controller.stepped():
            self._show()
        return loss

    @untraced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients of this rank that no step has used."""
        self._ranges.follow()
        self._built.engine.zero_gradients(set_to_none=set_to_none)
        self._optimizer.zero_grad(set_to_none=set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: nothing is reduced for backprops inside.

        A ``param.grad`` is then a view of the buffer that the next reduction uses.
        """
        with self._built.engine.no_sync():
            yield

    @contextmanager
    def join(self, *, buffers_before_forward: bool = False) -> Iterator[None]:
        """Inside, ranks may have unequal numbers of batches, as with DDP's ``join`` (collective).

        A rank that reaches the end early takes part in the others' steps with zero gradients, which
        count in the average. It takes their options, and clips as they do.

        buffers_before_forward: those of ``buffers="broadcast"`` travel when DDP's do, from the
        highest rank with batches, also after the block. Call ``begin_forward()`` each time.
        """
        self._live.check_joinable()
        if self.world.size > 1:
            with self._named_call("join()"):  # else its numbers would meet those of other steps
                self.world.barrier()
        # It counts steps, of which ranks take unequal numbers here.
        self._controller.give_up_planning()
        before = buffers_before_forward
        with self._live.join(self._shadow_step, buffers_before_forward=before):
            yield

    @torch.no_grad()
    @untraced
    def begin_forward(self) -> None:
        """Inside ``join(buffers_before_forward=True)``: a forward begins (collective)."""
        self._live.begin_forward()

    @torch.no_grad()
    @untraced
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their global norm is at most ``max_norm`` (collective).

        Call it between backward and ``step``. Waits for the reduce-scatters. Returns the norm
        before clipping, of the averaged gradients, the same on every rank; inf clips nothing.
        Where no rank has a gradient, as after ``step``, it is 0, and rank 0 warns.
        """
        norm = clip(self._built.engine, self.world, self._name, max_norm, norm_type)
        return torch.tensor(norm, dtype=torch.float64)

    @torch.no_grad()
    @untraced
    def scale_gradients_(self, factor: float) -> bool:
        """Multiply all gradients by ``factor``; False if any was inf or NaN (collective).

        Call it between backward and ``step``. Waits for the reduce-scatters.
        """
        with self._named_call(f"scale_gradients_({float(factor)})"):
            return scale(self._built.engine, self.world, factor)

    def follow_loss_scale(self, read: Callable[[], float]) -> None:
        """Losses are multiplied by what ``read`` returns at the start of each backward.

        With it, what a ``compress`` keeps for later steps fits their gradients. A GradScaler calls
        it in its first step; a run resumed with ``compress="powersgd"`` needs it before that.
        """
        self._live.follow_loss_scale(read)

    @torch.no_grad()
    @untraced
    def gradients(self) -> dict[str, Tensor]:
        """Copies of the whole averaged gradients by parameter name, on every rank (collective).

        Call it between backward and ``step``. Waits for the reduce-scatters, and gathers. Leaves
        out parameters without gradient on any rank.
        """
        found = self._built.engine.gradients()
        names = self._built.spec.names
        return {name: found[param] for param, name in names.items() if param in found}

    def keep_gradients(self, after_backward: Callable[[], None] | None = None) -> None:
        """From now on ``param.grad`` is a gradient as with DDP: each read or change is served.

        after_backward: called at the end of each backward outside ``no_sync``.

        Needs ``gather="gradients"``. A norm, and scaling by a number, work on shards. Every other
        use between backward and ``step`` waits for the all-gathers (collective). Gradients stay
        after ``step`` until they are cleared; a backward adds to what is not.

        Raises UsageError with ``gather="parameters"`` or ``eager=True``.
        """
        self._live.keep_gradients(after_backward)

    @torch.no_grad()
    @untraced
    def complete_gradients(self) -> None:
        """Show gradients of parameters that this rank's backward has not reached (collective).

        Call it after a backward, once ``keep_gradients`` holds: ``param.grad`` then is the average
        on every rank, if any rank has a gradient.
        """
        self._built.engine.complete_gradients()

    @torch.no_grad()
    @untraced
    def leave_gradients(self) -> None:
        """Make plain tensors of averaged gradients that no step has used (collective).

        Backwards inside ``no_sync()`` then add to ``param.grad``, as with DDP.
        """
        self._built.engine.leave_gradients()

    @untraced
    def synchronize(self) -> None:
        """Wait until every parameter shows the last step, and nothing else is under way."""
        self._live.synchronize()

    @untraced
    def state_dict(self) -> dict[str, Any]:
        """The state in plain torch form, whole on every rank (collective)."""
        return self._save(self._whole_state)

    def local_state(self) -> LocalState:
        """What this rank holds of the state; waits for the last step, but for nobody else.

        With a sparse ``compress`` it is collective: ranks bring together what they have not sent.
        The tensors are those that the next step changes.
        """
        return self._live.local_state()

    @untraced
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state in plain torch form, whole and the same on every rank.

        Where ranks have loaded different states, or some none, the next step or the one after ends
        in a ReplicaMismatchError on all of them.
        """
        self._load(state_dict, self._take_over)

    @untraced
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model; the buckets are laid out anew (collective).

        Gradients under way are dropped, those kept by ``no_sync`` are not. Raises ConfigError, with
        nothing added, for parameters not in the model, or of another DistributedOptimizer.
        """
        if not hasattr(self, "_controller"):  # torch's constructor adds the groups it is given
            super().add_param_group(param_group)
            return
        self._live.check_changeable("add_param_group()")
        with self._named_call("add_param_group()"):
            self._controller.grow(param_group)
            self._show()
            self._live.broadcast_parameters()

    @untraced
    def follow(self, plan: Plan) -> None:
        """Go on by ``plan``, with the same parameters and state (collective).

        Call it between ``step`` and the next backward: gradients under way are dropped, those kept
        by ``no_sync`` are not. Parameters may be under way as after ``step``. Raises ConfigError if
        it is for another model or world size, and MismatchError if ranks have different ones.
        """
        self._live.check_changeable("follow()")
        with self._named_call("follow()"):
            self._controller.follow(plan)
        self._show()

    @untraced
    def fuse(self, bucket_cap_mb: float) -> None:
        """Go on with buckets of about ``bucket_cap_mb`` MiB and without a plan (collective).

        Parameters and state stay. Call it where ``follow`` may be called; as there, parameters may
        be under way then.
        """
        self._live.check_changeable("fuse()")
        with self._named_call("fuse()"):
            self._controller.fuse(bucket_cap_mb)
        self._show()

    @untraced
    def close(self) -> None:
        """Finish the last step and detach from the model, which is then an ordinary one. With
        ``eager=True`` the step of a backward without one is taken first.

        Safe to call twice; the state can still be saved. The wrapped optimizer has it again with
        ``gather="gradients"``; with ``"parameters"`` it lies in shards: to go on with the wrapped
        one, have it load a ``state_dict()``. Raises UsageError inside ``join``.
        """
        self._built.engine.joining.refuse("close()")
        self._controller.abandon_planning()
        self._ranges.remove()
        with self._named_call("close()"):
            self._live.close()
        self._show()

    def _show(self) -> None:
        gather = self._state_by_param if self._live.holds_state else None
        self._share(gather, self._name_of, trains=self._live.trains_by_buckets)

    def _name_of(self, param: Tensor) -> str:
        names: Mapping[Any, str] = self._built.spec.names
        return names.get(param, "...")

    def _state_by_param(self) -> Mapping[Tensor, Mapping[str, Any]]:
        return self._live.by_param(self._whole_state())

    def _named_call(self, method: str) -> AbstractContextManager[None]:
        """What the world does inside belongs to the script's call of ``method``."""
        return self.world.named_call(f"{self._name}.{method}")

    def _whole_state(self) -> dict[str, Any]:
        # One name for both ways to it, which exchange the same.
        with self._named_call("state_dict() or optimizer.state"):
            return self._live.state_dict()

    @torch.no_grad()
    @untraced
    def _switch(self, mode: str) -> None:
        self._live.switch(mode)

    @untraced
    def _clear_state(self) -> None:
        self._live.clear_state()

    def _take_over(self, state_dict: dict[str, Any]) -> None:
        self._live.load_state_dict(state_dict)
        self._show()

    def _shadow_step(self) -> None:
        follow_clips(self._built.engine, self.world, self._name)
        self._built.engine.step(exhausted=True)
        self._after_step()

    def _after_step(self) -> None:
        self._forget_gathered()
        self._live.check_step()
