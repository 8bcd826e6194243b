"""Anchor: the values that all ranks share while each trains its own, and how they move on.

The anchor is a module of its own, and a ``DistributedOptimizer`` trains it. Its gradients come from
no backward: they are the anchor minus what a rank has made of it. So fragments travel as buckets
do, the outer optimizer's state is sharded, and codecs apply.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dearmpi.comm.world import World
from dearmpi.config import EngineConfig
from dearmpi.engine.optimizer import DistributedOptimizer
from dearmpi.local.finite_check import FiniteCheck
from dearmpi.plan.data.local_schedule import deal_runs
from dearmpi.torch_internals import parameter_table


class Anchor:
    """The shared values of parameters, in fp32 at least, and the outer optimizer that moves them.

    outer: trains the shared values. shared: them, by name, as parameters of a module.
    """

    def __init__(
        self,
        trained: Mapping[str, nn.Parameter],
        *,
        world: World,
        lr: float,
        momentum: float,
        config: EngineConfig,
    ) -> None:
        """Copy ``trained``, which must be the same on all ranks (collective).

        lr, momentum: of the outer SGD, which is Nesterov's if it has momentum.
        Raises what ``DistributedOptimizer`` raises.
        """
        self._trained = dict(trained)
        self._module = nn.Module()
        table = parameter_table(self._module)  # register_parameter refuses names with dots
        for name, param in trained.items():
            table[name] = nn.Parameter(_widened(param))
        sgd = torch.optim.SGD(
            self._module.parameters(), lr=lr, momentum=momentum, nesterov=momentum > 0
        )
        # The mean over one rank is what it has; a - (a - x) would differ from x by rounding.
        self._takes_over = world.size == 1 and lr == 1 and momentum == 0
        self.outer = DistributedOptimizer(sgd, self._module, world=world, config=config)
        self._exchanged = frozenset(trained)
        self._check = FiniteCheck(world, tuple(trained))

    @property
    def shared(self) -> dict[str, nn.Parameter]:
        """The shared values by name, as the last exchange has left them."""
        return dict(self._module.named_parameters())

    def fragments(self, number: int) -> tuple[tuple[str, ...], ...]:
        """The parameters' names in ``number`` runs of buckets, of about equal bytes.

        Raises ConfigError if there are not as many buckets.
        """
        buckets = [bucket for bucket in self.outer.layout if bucket.trained]
        runs = deal_runs([bucket.nbytes for bucket in buckets], number)
        return tuple(tuple(name for index in run for name in buckets[index].names) for run in runs)

    @torch.no_grad()
    def reset(self) -> None:
        """Take over what was trained, which must be the same on all ranks."""
        for name, value in self.shared.items():
            value.copy_(self._trained[name])

    @torch.no_grad()
    def start_exchange(
        self, names: tuple[str, ...], values: Mapping[str, Tensor] | None = None
    ) -> None:
        """Have the outer optimizer step on what ranks have learned of ``names`` (collective).

        values: what counts as learned; None: what is trained.
        Returns before the exchange is over. Ranks must call it after the same number of steps.
        Values that are not finite raise NonFiniteLossError on all ranks, once they wait for it.
        """
        values = self._trained if values is None else values
        self.wait()
        shared = self.shared
        if self._takes_over:
            self._check.start({name: values[name] for name in names})
            for name in names:
                shared[name].copy_(values[name])
            return
        self._limit_to(frozenset(names), shared)
        changes = {name: shared[name] - values[name].to(shared[name].dtype) for name in names}
        self._check.start(changes)
        for name, change in changes.items():
            shared[name].grad = change
        self.outer.step()
        if self.outer.world.size == 1:
            self.outer.zero_grad()

    @torch.no_grad()
    def merge(self, names: tuple[str, ...], mix: float) -> None:
        """Wait for the exchange of ``names``; then what is trained is ``mix`` of itself, and the
        rest of what is shared.
        """
        self.wait()
        shared = self.shared
        for name in names:
            trained, value = self._trained[name], shared[name].detach()
            if mix:
                value = value.mul(1 - mix).add_(trained.to(value.dtype), alpha=mix)
            trained.copy_(value)

    def wait(self) -> None:
        """Wait for the exchange under way. Raises NonFiniteLossError as ``start_exchange`` says."""
        self.outer.synchronize()
        self._check.read()

    def close(self) -> None:
        """Wait, and give back what exchanges have taken (collective)."""
        self.outer.close()
        self._check.close()

    def restore(self) -> None:
        """Give what is trained the shared values."""
        self._overwrite(self.shared)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, what is trained has the shared values, of which the last exchange is over."""
        self.wait()
        kept = {name: param.detach().clone() for name, param in self._trained.items()}
        self._overwrite(self.shared)
        try:
            yield
        finally:
            self._overwrite(kept)

    @torch.no_grad()
    def _overwrite(self, values: Mapping[str, Tensor]) -> None:
        for name, param in self._trained.items():
            param.copy_(values[name])

    def _limit_to(self, names: frozenset[str], shared: Mapping[str, nn.Parameter]) -> None:
        """Have the next step move ``names`` alone: buckets of frozen parameters do not travel."""
        for name in self._exchanged ^ names:
            shared[name].requires_grad_(name in names)
        self._exchanged = names


def _widened(param: nn.Parameter) -> Tensor:
    """A copy; in fp32 if that is wider, since deltas are smaller than the values."""
    value = param.detach()
    return value.to(torch.promote_types(value.dtype, torch.float32), copy=True)
