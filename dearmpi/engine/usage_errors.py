"""Errors of a use that would give wrong numbers, or never end."""

from __future__ import annotations

from dataclasses import dataclass

from dearmpi.errors import UsageError


@dataclass(frozen=True, slots=True)
class Misuse:
    """A kind of wrong use; a call makes its error.

    text: what happened and what to do, with fields in braces such as ``{name}`` of a parameter.
    """

    text: str
    code: str

    def __call__(self, name: str = "", **values: object) -> UsageError:
        """The error; ``name`` and ``values`` fill the fields."""
        return UsageError(self.text.format(name=name, **values), code=self.code)


# Some parameters are updated, and others not before ``step()``.
read_before_step = Misuse(
    "parameters are read between backward and step(), but with eager=True some of them are "
    "updated already, and others, which got no gradient, only after step(); read them after "
    "step(), or make the optimizer with eager=False. A signal handler, which may come at any "
    "moment, should set a flag only",
    code="parameters-read-too-early",
)

# A gradient of values that may be a step old, or of an older graph that saved no parameter.
computed_unread = Misuse(
    "a gradient of parameter {name} has come, but nothing has read {name} through the model since "
    "the last step. The forward may have used values of before it. This happens with what "
    "torch.jit, torch.fx or torch.export made of the model, or with another module with the same "
    "parameter. It also happens with parameters or a graph kept from before the step. Call "
    "optimizer.synchronize() after step(), or read the parameter as an attribute of its module",
    code="read-of-stale-parameter",
)

# The update may come before the change or after it, and on each rank otherwise.
written_early = Misuse(
    "parameter {name} was changed in place after step() and before the new value was waited for: "
    "one of the two changes is lost. Call optimizer.synchronize() after step(), or take the "
    "parameter from its module or model.parameters() at that moment: these wait",
    code="parameter-written-too-early",
)

# The parameters are NaN on purpose.
read_in_step = Misuse(
    "a signal handler or a finalizer reads parameters in the middle of step(), where "
    "DEAR_CHECK=1 has filled them with NaN; let it set a flag, and read them after the step",
    code="parameters-read-too-early",
)

# Nothing can be waited for, since some of the step was never submitted.
step_broken_off = Misuse(
    "step() was broken off in the middle, as by a KeyboardInterrupt, or a signal handler in "
    "the middle of step() waits for its end. Training cannot go on, but without eager=True the "
    "model's parameters are those of before the step, and can be read and saved. To stop "
    "between steps, let a signal handler set a flag, and agree on it by world.all_reduce()",
    code="step-interrupted",
)

# Other ranks may be at another bucket, with another part of it sent.
state_before_step = Misuse(
    "the optimizer's state is read between a backward and its step, but with a sparse compress "
    "ranks then bring together what they have not sent; read it after step(), or after "
    "zero_grad(). A signal handler, which may come at any moment, should set a flag only",
    code="step-missing",
)

# There is no moment at which all parameters are of one step.
synchronized_before_step = Misuse(
    "some parameters are updated and some not between a backward and its step (eager=True); "
    "call step() first",
    code="step-missing",
)

# They are gone once they are reduced.
looked_at_gradients = Misuse(
    "the gradients are updated as soon as they are reduced (eager=True), so they cannot be "
    "looked at or scaled before the step; make the optimizer with eager=False",
    code="eager-forbids",
)

# Some parameters may have been updated with them by now.
dropped = Misuse(
    "gradients are dropped that are updated as soon as they are reduced (eager=True promises a "
    "step after each backward); run a backward that may be dropped in no_sync(), or make the "
    "optimizer with eager=False",
    code="eager-forbids",
)

# Some parameters may have been updated by what held before.
set_late = Misuse(
    "{name} was changed between backward and step(), but buckets are updated during backprop "
    "with the options of its beginning (eager=True); set options before backward, or make the "
    "optimizer with eager=False",
    code="eager-forbids",
)

# Between backward and step each rank has its own shard of the gradients, or nothing.
kept_in_shards = Misuse(
    "gradients cannot be kept with gather={gather!r} and eager={eager}, with which no rank "
    'has whole gradients; make the optimizer with gather="gradients" and eager=False',
    code="settings-contradict",
)

# It comes too late for the updates.
second_backprop = Misuse(
    "a second backprop began before step(), but eager=True promises a step after each; use "
    "no_sync() for all but the last, or eager=False. If it is one backward, a layer is shared "
    "by several reentrant checkpoints, each a backprop of its own: use_reentrant=False",
    code="eager-forbids",
)

# What is kept locally cannot be added to what is being reduced.
unsynchronized_last = Misuse(
    "a backprop inside no_sync() follows a synchronizing one before step(); put no_sync() "
    "around all but the last",
    code="no-sync-misplaced",
)

# The schedule of this step goes on without the bucket of parameter ``name``.
unfrozen_late = Misuse(
    "parameter {name} was unfrozen between two backwards of a step, of which the first has "
    "set off the collectives without it; unfreeze it before that one, or put no_sync() around "
    "all but the last",
    code="frozen-between-backwards",
)

# In plain torch the step would still use it.
frozen_with_gradient = Misuse(
    "parameter {name} was frozen after a backward inside no_sync() whose gradient no step has "
    "used; freeze it after step(), or drop its gradient with zero_grad()",
    code="frozen-between-backwards",
)

# ``model.zero_grad()`` does it, and means to drop gradients that are on their way already.
cleared = Misuse(
    "the gradient of {name} was cleared or replaced between backward and step(), but it is "
    "already being reduced; use optimizer.zero_grad() to drop gradients",
    code="gradient-replaced",
)

# There is no reduce-scatter of indices.
sparse = Misuse(
    "the gradient of {name} is sparse, and buckets hold dense ones only; build its layer with "
    "sparse=False",
    code="tensor-not-served",
)

# By a hook that ran before the engine's.
taken = Misuse(
    "backprop has accumulated a gradient of {name}, but param.grad is None: a hook of the "
    "script (register_post_accumulate_grad_hook) has taken it away before it was reduced; "
    "remove the hook, and let optimizer.step() update the parameter",
    code="gradient-taken-by-hook",
)

# What is gathered would not reach it.
moved = Misuse(
    "parameter {name} has moved since DistributedOptimizer was made (model.to(), .data = ... "
    "or a new Parameter does that); to give it other values, copy them into it "
    "(param.data.copy_(values)); else move or convert the model first, then make the optimizer",
    code="params-moved",
)

# As ``moved``, into memory that torch shares between processes.
shared = Misuse(
    "parameter {name} has moved into memory that is shared with other processes since "
    "DistributedOptimizer was made: the model, or its state_dict(), was sent to another "
    "process (an argument of a multiprocessing Process, or through a Queue), or share_memory() "
    "was called; send a copy instead, such as copy.deepcopy(model), or call "
    "model.share_memory() first and make the optimizer with gather='gradients'",
    code="params-moved",
)

# A hook of the script's own would hold up the backprop that others wait for.
read_in_backprop = Misuse(
    "the gradient of {name} is being reduced over the ranks, and a hook reads or changes it "
    "within the backward; clip or scale gradients after backward, by "
    "optimizer.clip_grad_norm_() or optimizer.scale_gradients_()",
    code="gradient-in-reduction",
)

# What stands in ``param.grad`` was kept until after the step.
used_up = Misuse(
    "the gradient of {name} is gone: step() or zero_grad() has used it up since it was read; "
    "read param.grad anew between backward and step()",
    code="gradient-used-up",
)

# Clipping it would clip this rank's own.
still_local = Misuse(
    "a backward inside no_sync() has left a gradient of {name} that the last backward did not "
    "add to, so it is not averaged yet; to clip, call optimizer.clip_grad_norm_(), which "
    "averages it first; a script for DDP needs find_unused_parameters=True, without --gather "
    "parameters",
    code="gradient-not-averaged",
)

# Those would find another norm, and leave their part of it as it is.
lacking_on_some_ranks = Misuse(
    "the gradient of {name} is None on some ranks, whose backward did not reach it, and torch "
    "leaves it out there; to clip or to know the norm, call optimizer.clip_grad_norm_(), which "
    "takes in what any rank has",
    code="gradient-missing-on-some-ranks",
)

# Ranks without batches would have to take part.
clipped_in_join = Misuse(
    "torch's functions cannot clip gradients, or find their norm, inside join(), where ranks "
    "without batches have to follow; call optimizer.clip_grad_norm_(), or run a script for DDP "
    "without --gather parameters",
    code="join-misused",
)

# Ranks without batches take part in whole iterations.
left_before_step = Misuse(
    "join() ends after a backward that no step() followed, and its gradients would wait for "
    "ever; call step() before the block is left",
    code="join-misused",
)

# The model's hooks and the other ranks know of one alone.
copied = Misuse(
    "a DistributedOptimizer cannot be copied or pickled, since it is attached to its model and "
    "to the other ranks; save its state_dict()",
    code="optimizer-copied",
)

# Its hooks on the model went with it, those of other ranks perhaps not yet.
forgotten = Misuse(
    "backprop has made a gradient of {name}, whose DistributedOptimizer the script has dropped "
    "without close(): nothing averages it; keep a reference to the optimizer, or call its close() "
    "on every rank before it is dropped",
    code="optimizer-dropped",
)

# The copies that update the buckets have what it was when they were made.
set_on_optimizer = Misuse(
    "{name} was set on the optimizer after its DistributedOptimizer was made, and would have "
    "no effect: each bucket is updated by a copy of the wrapped optimizer; set it before, or "
    "make it an option of the param groups, which each step reads",
    code="optimizer-changed",
)

# What is set in the groups on show has no effect any more.
divorced = Misuse(
    "the wrapped optimizer has other param groups than its DistributedOptimizer, as after a "
    "load_state_dict() of its own; call load_state_dict() of the DistributedOptimizer",
    code="param-groups-changed",
)

# Buckets and updates are made for the groups as they were.
regrouped = Misuse(
    "parameters were added to, removed from or moved between param groups; add them with "
    "add_param_group() of the DistributedOptimizer, freeze what is not to be trained, or "
    "close() it and make another",
    code="param-groups-changed",
)

# It was a copy.
state_changed = Misuse(
    "{name} was changed in place, but optimizer.state is a copy, gathered from all ranks, and "
    "the change would be lost; change what state_dict() returns and give it to "
    "load_state_dict()",
    code="state-changed-in-place",
)


def assigned(name: str) -> UsageError:
    """The engine would go on with the one that it has."""
    cure = (
        "set options in the groups that are there, and add parameters with add_param_group()"
        if name == "param_groups"
        else "load a state with load_state_dict()"
    )
    return UsageError(
        f"another optimizer.{name} would have no effect, as that of the wrapped optimizer is in "
        f"use; {cure}",
        code="optimizer-changed",
    )
