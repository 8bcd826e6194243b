"""The update of a bucket's whole parameters, as every rank does it in the paper."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dearmpi.comm.api.collectives import Completed, Request
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.update.master import MASTER, MasterCopy, MasterRule
from dearmpi.engine.update.update import Options, beside, clone, fit, step_on


class WholeUpdate:
    """The optimizer on a bucket's whole parameters, from averaged gradients.

    It works on aliases that share the parameters' memory: the main thread may clear ``param.grad``
    at any time.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        bucket: BucketRuntime,
        group_of: Mapping[nn.Parameter, int],
        *,
        masters: MasterRule,
        scalars: Sequence[frozenset[str]],
    ) -> None:
        """``scalars``: by group, names of scalar entries of the state that lie where the
        parameters are.
        """
        self.bucket, self._scalars = bucket, scalars
        self._aliases = [param.detach() for param in bucket.params]
        self._masters: dict[int, MasterCopy] = {}
        for slot, param in enumerate(bucket.params):
            if (master := masters.copy_of(param.detach())) is not None:
                self._masters[slot] = master
                self._aliases[slot] = master.values
        for param, alias in zip(bucket.params, self._aliases, strict=True):
            alias.__dict__.update(param.__dict__)  # such as a rate that an optimizer looks up there
        self._groups = [group_of[param] for param in bucket.params]
        self._optimizer = clone(optimizer, [], defaultdict(dict))

    def start_fetch(self) -> Request:
        """Everything is here."""
        return Completed()

    @torch.no_grad()
    def step(self, options: Options, unused: frozenset[int]) -> None:
        """Update the parameters that have a gradient somewhere."""
        members: dict[int, list[Tensor]] = {}
        for slot, (alias, group) in enumerate(zip(self._aliases, self._groups, strict=True)):
            if slot not in unused:
                if slot in self._masters:
                    self._masters[slot].refresh()
                alias.grad = self.bucket.gradients.views[slot].to(alias.dtype)
                members.setdefault(group, []).append(alias)
        step_on(self._optimizer, options, members)
        for slot in self._masters.keys() - unused:
            self._masters[slot].publish()

    def states(self) -> dict[str, dict[str, Any]]:
        """The optimizer's state by parameter name."""
        states: dict[str, dict[str, Any]] = {}
        for slot, (name, alias) in enumerate(
            zip(self.bucket.spec.names, self._aliases, strict=True)
        ):
            state = dict(self._optimizer.state.get(alias, {}))
            if slot in self._masters and self._masters[slot].stepped:
                state[MASTER] = alias
            if state:
                states[name] = state
        return states

    def set_states(
        self,
        states: Mapping[str, dict[str, Any]],
        *,
        elementwise: frozenset[str] = frozenset(),
    ) -> None:
        """Replace the optimizer's state; ``elementwise`` as in ``load_state``."""
        self._optimizer.state.clear()
        for slot, (name, alias) in enumerate(
            zip(self.bucket.spec.names, self._aliases, strict=True)
        ):
            state = beside(states.get(name, {}), alias, self._scalars[self._groups[slot]])
            if slot in self._masters:
                self._masters[slot].restore(state.pop(MASTER, None))
            if state:
                self._optimizer.state[alias] = {
                    key: fit(value, alias, elementwise=key in elementwise)
                    for key, value in state.items()
                }
