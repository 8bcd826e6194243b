"""Rounds: what clients do in one, and what of their values counts, for any number of clients.

The order is the paper's: a client moves its control variate right after the exchange that it took
part in. A control variate that follows later, by values of a later round, does not converge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from dearmpi.comm.lifecycle import choose_world
from dearmpi.comm.world import World
from dearmpi.config import EngineConfig
from dearmpi.local.anchor import Anchor
from dearmpi.plan.data.rounds import RoundRule

_NAME = "values"


def mask_of(column: int, first: int, last: int, *, sparsity: int, cohort: int) -> Tensor:
    """Which of the coordinates ``first`` to ``last`` the client with ``column`` sends; 1-D, bool.

    Each coordinate is sent by ``sparsity`` columns of ``cohort``, and each column sends as many
    coordinates as any other, up to one.
    """
    coordinates = torch.arange(first, last, device="cpu")
    return (column - coordinates * sparsity) % cohort < sparsity


class ClientRounds:
    """Clients dealt to ranks, which minimise the mean of their functions together.

    shared: 1-D, the same on all ranks. controls: the control variates of this rank's clients, by
    number; those of all clients add up to zero. num_steps, num_sent: local steps, and numbers that
    a client has sent in the mean, so far.

    Each round exchanges whole vectors in the engine's buckets: masks decide what counts, and
    ``num_sent`` what a client would have to send, not the bytes of this job.
    """

    def __init__(
        self,
        start: Tensor,
        rule: RoundRule,
        *,
        world: World | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        """start: 1-D, the same on all ranks (collective)."""
        self._rule, self.world = rule, choose_world(world)
        self._anchor = Anchor(
            {_NAME: nn.Parameter(start.clone())},
            world=self.world,
            lr=1.0,
            momentum=0.0,
            config=config or EngineConfig(),
        )
        clients = range(self.world.rank, rule.num_clients, self.world.size)
        self.controls = {client: torch.zeros_like(start) for client in clients}
        self.num_rounds = self.num_steps = 0
        self.num_sent = 0.0

    @property
    def shared(self) -> Tensor:
        """Waits for the last exchange."""
        return self._anchor.shared[_NAME].detach()

    @torch.no_grad()
    def run(self, gradient: Callable[[int, Tensor], Tensor]) -> None:
        """One round (collective). gradient: of a client's function at a point."""
        rule, drawn = self._rule, self._rule.draw(self.num_rounds)
        start = self.shared.clone()
        columns = {client: column for column, client in enumerate(drawn.cohort)}
        values: dict[int, Tensor] = {}
        for client in self.controls.keys() & columns.keys():
            value = values[client] = start.clone()
            for _ in range(drawn.num_steps):
                with torch.enable_grad():
                    slope = gradient(client, value.clone())
                value.sub_(slope - self.controls[client], alpha=rule.lr)
        masks = {
            client: mask_of(
                columns[client], 0, len(start), sparsity=rule.sparsity, cohort=rule.cohort
            )
            for client in values
        }
        sent = weighted_sum(
            ((masks[client], values[client]) for client in sorted(values)),
            like=start,
            weight=self.world.size / rule.sparsity,
        )
        self._anchor.start_exchange((_NAME,), {_NAME: sent})
        self._anchor.wait()
        shared = self.shared
        for client, value in values.items():
            follow(self.controls[client], shared, value, masks[client], rule)
        self.num_rounds += 1
        self.num_steps += drawn.num_steps
        self.num_sent += len(start) * rule.sparsity / rule.num_clients

    def close(self) -> None:
        """Give back what the exchange has taken (collective)."""
        self._anchor.close()


def weighted_sum(parts: Iterable[tuple[Tensor, Tensor]], *, like: Tensor, weight: float) -> Tensor:
    """``weight`` times the sum of values where their masks are set; parts: masks and values."""
    total = torch.zeros_like(like)
    for mask, value in parts:
        total.add_(torch.where(mask.to(value.device), value, 0))
    return total.mul_(weight)


def follow(control: Tensor, shared: Tensor, value: Tensor, mask: Tensor, rule: RoundRule) -> None:
    """Move the control variate of a client by what the exchange made of its ``value``."""
    change = torch.where(mask.to(value.device), shared - value, 0)
    control.add_(change, alpha=rule.eta / rule.lr)


def control_sum(world: World, controls: Mapping[int, Tensor], *, like: Tensor) -> Tensor:
    """The sum of all clients' control variates, which is zero but for rounding (collective)."""
    total = torch.zeros_like(like, dtype=torch.float64)
    for client in sorted(controls):
        total.add_(controls[client])
    return torch.tensor(world.all_reduce(total.tolist()), dtype=torch.float64)
