"""Updates: the user's optimizer, applied to one bucket at a time.

All kinds run a clone of the optimizer with its class and hyperparameters, but parameter groups of
its own: over this rank's shard (``ShardUpdate``), over the bucket's whole parameters
(``WholeUpdate``), as every rank does in the paper, or over both kinds (``OwnedUpdate``).
"""

from __future__ import annotations

import traceback
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dearmpi.comm.api.collectives import Completed, Request
from dearmpi.device.accelerator import is_of_device
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.bucket.buffers import shaped_like
from dearmpi.engine.update.master import OWED, LeftOver, MasterCopy, MasterRule
from dearmpi.errors import DearError
from dearmpi.torch_internals import plain_step, versions_of

Options = Sequence[Mapping[str, Any]]


class Update(Protocol):
    """An optimizer step on one bucket; runs on the thread that drives progress."""

    def start_fetch(self) -> Request:
        """Bring what ``step`` needs to where it works; call that once this is complete."""
        ...

    def step(self, options: Options, unused: frozenset[int]) -> None:
        """Update with the hyperparameters ``options`` (per parameter group).

        ``unused``: slots without gradient on any rank; torch skips such parameters, and so here.
        """
        ...


def read_options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """A copy of each parameter group's hyperparameters as they are now.

    Not of ``param_names``, which no step reads: there may be hundreds, and each step asks.
    """
    return [
        {
            key: value if key == "param_names" else _copy_option(value)
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


def _copy_option(value: Any) -> Any:
    """``value``, which a script may go on to change in place: a tensor, or a list as from YAML."""
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (list, tuple):
        return type(value)(map(_copy_option, value))
    return value


def clone(optimizer: Optimizer, param_groups: list[dict[str, Any]], state: Any) -> Optimizer:
    """An optimizer like ``optimizer`` over other groups; hooks and wrapped steps stay behind."""
    twin: Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)
    for name, value in optimizer.__dict__.items():
        if isinstance(value, OrderedDict) and "hooks" in name:
            twin.__dict__[name] = OrderedDict()
    twin.param_groups = param_groups
    twin.state = state
    return twin


def step_clone(optimizer: Optimizer, param_groups: list[dict[str, Any]], state: Any) -> None:
    """One step of a ``clone``, on parameters whose ``grad`` is set, without hooks."""
    twin = clone(optimizer, param_groups, state)
    plain_step(twin)(twin)


def step_on(
    optimizer: Optimizer, options: Options, members: Mapping[int, Sequence[Tensor]]
) -> None:
    """Step ``optimizer`` on tensors whose ``grad`` is set, given by group, and clear it.

    In the step they require grad, as parameters do: some optimizers leave out what does not.
    """
    optimizer.param_groups = [
        {**options[group], "params": list(tensors)} for group, tensors in members.items()
    ]
    given = [tensor for tensors in members.values() for tensor in tensors]
    for tensor in given:
        tensor.requires_grad_(True)
    if given:
        # Without the hooks that torch calls around a step: DistributedOptimizer calls them once for
        # all buckets.
        plain_step(optimizer)(optimizer)
    for tensor in given:
        tensor.requires_grad_(False)
        tensor.grad = None


@contextmanager
def failures_of_step() -> Iterator[None]:
    """Raise DearError for what the optimizer's own code raises inside, which is no failure of
    communication. Those of this package and of devices stay as they are.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, DearError) or is_of_device(error):
            raise
        raised = "".join(traceback.format_exception_only(error)).strip()
        raise DearError(
            f"the optimizer's step raised {raised}; correct what the traceback names, and start "
            "the job again from a checkpoint",
            code="optimizer-step-failed",
        ) from error


def is_changed_by(act: Callable[[], object], tensors: Sequence[Tensor]) -> bool:
    """Whether ``act`` writes to one of ``tensors``."""
    versions = versions_of(tensors)
    act()
    return versions != versions_of(tensors)


def on_host(entries: Mapping[str, Any]) -> dict[str, Any]:
    """``entries`` with all tensors in host memory."""
    return {
        key: value.cpu() if isinstance(value, Tensor) else value for key, value in entries.items()
    }


def beside(state: Mapping[str, Any], values: Tensor, scalars: frozenset[str]) -> dict[str, Any]:
    """The ``state`` of ``values``, with ``scalars`` on their device, wherever these come from."""
    return {
        key: value.to(values.device) if key in scalars and isinstance(value, Tensor) else value
        for key, value in state.items()
    }


def is_elementwise_tensor(value: object, values: Tensor) -> bool:
    """Whether a state entry has one element per parameter element."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.numel() == values.numel()


def fit(value: Any, values: Tensor, *, elementwise: bool) -> Any:
    """An entry of the state of ``values``, on their device, and of the dtype that it has: that is
    for the optimizer to choose. Scalars stay where they are, except for an ``elementwise`` entry of
    a scalar parameter.
    """
    if not isinstance(value, Tensor):
        return value
    of_scalar = elementwise and value.dim() == values.dim() == 0
    return value if value.dim() == 0 and not of_scalar else value.to(values.device)


def cut(state: Mapping[str, Any], values: Tensor, start: int, stop: int) -> dict[str, Any]:
    """The state of elements ``start`` to ``stop`` out of the state of ``values``."""
    part: dict[str, Any] = {}
    for key, value in state.items():
        if is_elementwise_tensor(value, values):
            part[key] = value[start:stop].clone()
        else:
            part[key] = value.clone() if isinstance(value, Tensor) else value
    return part


class WholeUpdate:
    """The optimizer on a bucket's whole parameters, from averaged gradients.

    It works on aliases that share the parameters' memory, since the main thread may clear
    ``param.grad`` at any time. They do not share torch's count of changes, which then counts those
    of the script.

    slots: of the parameters that it updates; all of the bucket.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        bucket: BucketRuntime,
        group_of: Mapping[nn.Parameter, int],
        *,
        masters: MasterRule,
        scalars: Sequence[frozenset[str]],
        slots: Collection[int] | None = None,
    ) -> None:
        """``scalars``: by group, names of scalar entries of the state that lie where the
        parameters are.
        """
        self.bucket, self._scalars = bucket, scalars
        self.slots = tuple(range(len(bucket.params)) if slots is None else slots)
        self._aliases: dict[int, Tensor] = {}
        self._masters: dict[int, MasterCopy] = {}
        self._left = {slot: LeftOver() for slot in self.slots}
        for slot in self.slots:
            param = bucket.params[slot]
            alias = param.data
            if (master := masters.copy_of(alias, shown=bucket.shown_of(slot))) is not None:
                self._masters[slot] = master
                alias = master.values
            alias.__dict__.update(param.__dict__)  # such as a rate that an optimizer looks up there
            self._aliases[slot] = alias
        self._groups = {slot: group_of[bucket.params[slot]] for slot in self.slots}
        self._optimizer = clone(optimizer, [], defaultdict(dict))

    @property
    def names(self) -> tuple[str, ...]:
        """Of the parameters that it updates."""
        return tuple(self.bucket.spec.names[slot] for slot in self.slots)

    def start_fetch(self) -> Request:
        """Everything is here."""
        return Completed()

    @torch.no_grad()
    def step(self, options: Options, unused: frozenset[int]) -> None:
        """Update the parameters that have a gradient somewhere."""
        members: dict[int, list[Tensor]] = {}
        for slot, alias in self._aliases.items():
            if slot in unused:
                if self.bucket.travels_as_factors:
                    self._keep_unused(slot)
            else:
                if slot in self._masters:
                    self._masters[slot].refresh()
                self._left[slot].take_up(alias)
                alias.grad = self.bucket.gradients.views[slot].to(alias.dtype)
                if self.bucket.counts_owed:
                    self._owed(slot).zero_()
                members.setdefault(self._groups[slot], []).append(alias)
        step_on(self._optimizer, options, members)
        if self.bucket.counts_owed and not unused:
            self.bucket.owed = None
        for slot in self._masters.keys() - unused:
            self._masters[slot].publish()

    def _keep_unused(self, slot: int) -> None:
        """What ranks had not sent of a parameter may come when none of them uses it."""
        if bool(self.bucket.gradients.views[slot].any()):
            self._owed(slot, makes=True).add_(self.bucket.gradients.views[slot])

    def _owed(self, slot: int, *, makes: bool = False) -> Tensor:
        """What the bucket owes of a parameter, in its shape."""
        if self.bucket.owed is None and makes:
            self.bucket.owed = torch.zeros_like(self.bucket.gradients.data)
        assert self.bucket.owed is not None
        start = self.bucket.spec.placements[slot].start
        return shaped_like(self.bucket.params[slot].detach(), self.bucket.owed, start)

    def _copy_of(self, slot: int) -> MasterCopy | LeftOver:
        return self._masters.get(slot, self._left[slot])

    def states(self) -> dict[str, dict[str, Any]]:
        """The optimizer's state by parameter name; what the bucket owes stands among it."""
        states: dict[str, dict[str, Any]] = {}
        for slot, alias in self._aliases.items():
            state = dict(self._optimizer.state.get(alias, {}))
            if self.bucket.owed is not None:
                state[OWED] = self._owed(slot).clone()
            state |= self._copy_of(slot).entries()
            if state:
                states[self.bucket.spec.names[slot]] = state
        return states

    def set_states(
        self,
        states: Mapping[str, dict[str, Any]],
        *,
        elementwise: frozenset[str] = frozenset(),
    ) -> None:
        """Replace the optimizer's state; ``elementwise`` as in ``load_state``."""
        self._optimizer.state.clear()
        self.bucket.owed = None
        for slot, alias in self._aliases.items():
            state = states.get(self.bucket.spec.names[slot], {})
            state = beside(state, alias, self._scalars[self._groups[slot]])
            if (owed := state.pop(OWED, None)) is not None:
                self._owed(slot, makes=True).copy_(owed)
            self._copy_of(slot).restore(state)
            if state:
                self._optimizer.state[alias] = {
                    key: fit(value, alias, elementwise=key in elementwise)
                    for key, value in state.items()
                }
