"""Rounds: what clients do in one, and what of their values counts, for any number of clients.

The order is the paper's: a client moves its control variate right after the exchange that it took
part in. A control variate that follows later, by values of a later round, does not converge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from dearmpi.comm.lifecycle import choose_world
from dearmpi.comm.world import World
from dearmpi.config import EngineConfig
from dearmpi.local.anchor import Anchor
from dearmpi.plan.data.local_schedule import RoundRule

_NAME = "values"
Slopes = Callable[[Tensor], Tensor]  # of (clients, size), of one client's point in each row


def mask_of(column: int, first: int, last: int, *, sparsity: int, cohort: int) -> Tensor:
    """Which of the coordinates ``first`` to ``last`` the client with ``column`` sends; 1-D, bool.

    Each coordinate is sent by ``sparsity`` columns of ``cohort``, and each column sends as many
    coordinates as any other, up to one.
    """
    return _masks_of([column], first, last, sparsity=sparsity, cohort=cohort)[0]


def _masks_of(
    columns: Sequence[int], first: int, last: int, *, sparsity: int, cohort: int
) -> Tensor:
    coordinates = torch.arange(first, last, device="cpu")
    own = torch.tensor(columns, device="cpu").reshape(-1, 1)
    return (own - coordinates * sparsity) % cohort < sparsity


class ClientRounds:
    """Clients dealt to ranks, which minimise the mean of their functions together.

    shared: 1-D, the same on all ranks. controls: the control variates of this rank's clients, by
    number; those of all clients add up to zero. num_steps, num_sent, num_received: local steps, and
    numbers that a client has sent and received in the mean, so far.

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
        self._controls = start.new_zeros(len(clients), len(start))
        self.controls = dict(zip(clients, self._controls, strict=True))
        self.num_rounds = self.num_steps = 0
        self.num_sent = self.num_received = 0.0

    @property
    def shared(self) -> Tensor:
        """Waits for the last exchange."""
        return self._anchor.shared[_NAME].detach()

    def run(self, gradient: Callable[[int, Tensor], Tensor]) -> None:
        """One round (collective). gradient: of a client's function at a point."""

        def slopes_of(clients: Sequence[int]) -> Slopes:
            return lambda points: torch.stack(
                [
                    gradient(client, point.clone())
                    for client, point in zip(clients, points, strict=True)
                ]
            )

        self.run_together(slopes_of)

    @torch.no_grad()
    def run_together(self, slopes_of: Callable[[Sequence[int]], Slopes]) -> None:
        """One round (collective).

        slopes_of: for clients of this rank, at least one, gradients of their functions at one
            point each: (clients, size) to the same.
        """
        rule, drawn = self._rule, self._rule.draw(self.num_rounds)
        start = self.shared.clone()
        columns = {client: column for column, client in enumerate(drawn.cohort)}
        clients = sorted(self.controls.keys() & columns.keys())
        rows = [client // self.world.size for client in clients]
        values, controls = start.repeat(len(clients), 1), self._controls[rows]
        if clients:
            slopes = slopes_of(clients)
            for _ in range(drawn.num_steps):
                with torch.enable_grad():
                    slope = slopes(values)
                values.sub_(slope - controls, alpha=rule.lr)
        masks = _masks_of(
            [columns[client] for client in clients],
            0,
            len(start),
            sparsity=rule.sparsity,
            cohort=rule.cohort,
        ).to(start.device)
        sent = torch.where(masks, values, 0).sum(0).mul_(self.world.size / rule.sparsity)
        self._anchor.start_exchange((_NAME,), {_NAME: sent})
        self._anchor.wait()
        if rule.eta:
            follow(controls, self.shared, values, masks, rule)
            self._controls[rows] = controls
        self.num_rounds += 1
        self.num_steps += drawn.num_steps
        self.num_sent += len(start) * rule.sparsity / rule.num_clients
        self.num_received += len(start) * rule.cohort / rule.num_clients

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
