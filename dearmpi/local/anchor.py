"""Anchor: the values that all ranks share while each trains its own, and how they move on.

The anchor is a module of its own, and a ``DistributedOptimizer`` trains it. Its gradients come from
no backward: they are the anchor minus what a rank has made of it. So fragments travel as buckets
do, the outer optimizer's state is sharded, and codecs apply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from dearmpi.comm.messages.values import HostBuffer
from dearmpi.comm.world import World
from dearmpi.config import EngineConfig
from dearmpi.engine.optimizer import DistributedOptimizer
from dearmpi.errors import NonFiniteLossError
from dearmpi.local.sync_settings import shared_dtype
from dearmpi.plan.data.local_schedule import deal_runs
from dearmpi.torch_internals import parameter_table

_NONE = float(2**53)  # above any rank and parameter


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
            table[name] = nn.Parameter(param.detach().to(shared_dtype(param), copy=True))
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

    def start_check(self, values: Mapping[str, Tensor]) -> None:
        """Have the next ``wait`` raise NonFiniteLossError on all ranks, if ``values`` by name are
        not finite on one of them (collective).
        """
        self._check.start(values)

    @torch.no_grad()
    def take(self, values: Mapping[str, Tensor]) -> None:
        """Have ``values`` by name, the same on all ranks, be what is shared."""
        shared = self.shared
        for name, value in values.items():
            shared[name].copy_(value)

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


class FiniteCheck:
    """Travels beside an exchange, so that nothing waits for it but what waits for the exchange.

    names: of the parameters, in the same order on all ranks (collective).
    """

    def __init__(self, world: World, names: Sequence[str]) -> None:
        self._world, self._names = world, tuple(names)
        self._channel = world.open_channel("finite check", window=1)
        self._report: tuple[HostBuffer, Callable[[], None]] | None = None  # and how to wait for it

    def start(self, changes: Mapping[str, Tensor]) -> None:
        """Send whether this rank's ``changes``, by parameter, are finite (collective)."""
        own = _NONE
        for name, is_finite in zip(changes, _are_finite(list(changes.values())), strict=True):
            if not is_finite:
                own = float(self._world.rank * len(self._names) + self._names.index(name))
                break
        report = HostBuffer(np.array([own]))
        wait = self._channel.begin("the finite check", lambda c: c.start_all_reduce(report, "min"))
        self._report = report, wait

    def read(self) -> None:
        """Raise NonFiniteLossError, on all ranks alike, if one of them had NaN or infinity.

        It waits for the check that was started last. Once read, the check is over.
        """
        if self._report is None:
            return
        (report, wait), self._report = self._report, None
        wait()
        (found,) = report.array.tolist()
        if found < _NONE:
            rank, index = divmod(int(found), len(self._names))
            raise NonFiniteLossError(
                f"rank {rank} on {self._world.hosts[rank]} brought NaN or infinity in "
                f"{self._names[index]} into an exchange; go on from a checkpoint with a lower "
                "learning rate, or clip gradients",
                code="not-finite",
            )

    def close(self) -> None:
        """Give the channel back (collective)."""
        self._channel.close()


def _are_finite(tensors: Sequence[Tensor]) -> list[bool]:
    """A sum is not finite if one of its numbers is not, or if it is too large; a device is waited
    for once.
    """
    if not tensors:
        return []
    device = tensors[0].device
    sums: list[bool] = torch.stack([one.sum().isfinite().to(device) for one in tensors]).tolist()
    return [flag or bool(one.isfinite().all()) for flag, one in zip(sums, tensors, strict=True)]
