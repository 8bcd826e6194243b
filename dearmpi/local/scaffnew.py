"""Scaffnew, CompressedScaffnew and TAMUNA as an optimizer: every rank is a client."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dearmpi.comm.api.collectives import Chain, Collectives, Request
from dearmpi.comm.lifecycle import choose_world
from dearmpi.comm.world import World
from dearmpi.config import EngineConfig
from dearmpi.engine.trace.spans import IterationTimes, Traffic
from dearmpi.errors import ConfigError, UsageError
from dearmpi.local.client_rounds import follow, mask_of, weighted_sum
from dearmpi.local.local_optimizer import AVERAGING, LocalOptimizer
from dearmpi.local.sync_settings import compare_ranks
from dearmpi.plan.data.local_schedule import Round, RoundRule


class Scaffnew(LocalOptimizer):
    """Local gradient steps with control variates, which find the optimum of unequal ranks exactly.

    Each rank takes a random number of steps, the same on all; then ranks go on from the average.
    Its control variates keep it from drifting to the optimum of its own data. With ``sparsity``
    below the number of ranks a coordinate is averaged over that many (CompressedScaffnew); with a
    ``cohort``, so many ranks take part in a round (TAMUNA), and others skip their steps.

    The acceleration is proven for strongly convex functions, not for networks. Noise of batches
    remains, in proportion to ``lr``. Ranks must take equal numbers of steps.

    With ``sparsity`` below the cohort a rank sends only what its mask keeps; averages come whole.
    On a device, with several dtypes, or by a ``config`` beyond bucket sizes, all values travel.

    world, rule: the ranks; the settings, with p and lr as they are used. controls: by parameter's
    name, this rank's control variates. num_rounds: rounds that are over.
    """

    _own_kind = "control variates", "they begin at zero again"

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        model: nn.Module,
        *,
        lr: float | None = None,
        p: float | None = None,
        sparsity: int | None = None,
        cohort: int | None = None,
        smoothness: tuple[float, float] | None = None,
        seed: int = 0,
        world: World | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        """Rank 0's parameters and buffers are copied to all ranks (collective).

        lr, p: of the local steps; the chance that one is the last of its round. Without, they
        follow from ``smoothness``: L and mu of the functions. sparsity, cohort: None: all ranks.

        Raises ConfigError for settings out of range, MismatchError where ranks have other ones.
        """
        world = choose_world(world)
        size = world.size
        cohort = size if cohort is None else cohort
        sparsity = cohort if sparsity is None else sparsity
        rule = _make_rule(lr, p, smoothness, RoundRule(size, 1.0, 1.0, sparsity, cohort, seed))
        inner = torch.optim.SGD(list(params), lr=rule.lr)
        if len(inner.param_groups) != 1:
            raise UsageError(
                "Scaffnew has no param groups: give the parameters as one list",
                code="local-steps-forbid",
            )
        compare_ranks(world, repr(rule))
        given = {**AVERAGING, "compress": "none" if config is None else config.compress}
        super().__init__(inner, model, sync_every=1, world=world, config=config, **given)
        self.rule = rule
        self.controls = {
            name: torch.zeros_like(value, requires_grad=False)
            for name, value in self._anchor.shared.items()
        }
        self.num_rounds = self._steps_in_round = 0
        values = list(self._anchor.shared.values())
        self._masked: MaskedExchange | None = None
        if rule.sparsity < rule.cohort and _is_plain(config, values):
            numel = sum(value.numel() for value in values)
            self._masked = MaskedExchange(numel, values[0].dtype, rule, world)

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for exchanges."""
        return super().waited_s + (0.0 if self._masked is None else self._masked.waited_s)

    @property
    def traffic(self) -> Traffic:
        """The bytes of an exchange."""
        return super().traffic if self._masked is None else self._masked.traffic

    @property
    def round(self) -> Round:
        """The one under way."""
        return self.rule.draw(self.num_rounds)

    @property
    def takes_part(self) -> bool:
        """Whether this rank is in the cohort; else it need not compute gradients."""
        return self.world.rank in self.round.cohort

    def progress(self) -> dict[str, Any]:
        """As the base class, with the place in the round."""
        return {
            **super().progress(),
            "rule": repr(self.rule),
            "num_rounds": self.num_rounds,
            "steps_in_round": self._steps_in_round,
        }

    @torch.no_grad()
    def _step_alone(self) -> None:
        lr = self.param_groups[0]["lr"]
        if lr != self.rule.lr:
            raise UsageError(
                f"lr is {lr}, but control variates are of {self.rule.lr}: leave schedulers out",
                code="local-steps-forbid",
            )
        if self.takes_part:
            for name, param in self._trained.items():
                control = self.controls[name].to(param.dtype)
                if param.grad is not None:
                    param.sub_(param.grad - control, alpha=lr)
                elif param.requires_grad:  # this rank does not use it: a gradient of zero
                    param.add_(control, alpha=lr)
        self._steps_in_round += 1

    @torch.no_grad()
    def _exchange(self) -> None:
        drawn = self.round
        if self._steps_in_round == drawn.num_steps:
            if self._masked is None:
                self._average(drawn)
                self._times = self.outer.times
            else:
                self._average_masked(drawn, self._masked)
            self.num_rounds, self._steps_in_round = self.num_rounds + 1, 0

    def _average_masked(self, drawn: Round, masked: MaskedExchange) -> None:
        """As ``_average``, to which a rank sends only what its mask keeps."""
        shared, changes = self._anchor.shared, self._changes(drawn)
        before_s = masked.waited_s
        self._anchor.start_check(changes)
        flat = torch.cat([value.reshape(-1) for value in changes.values()]) if changes else None
        mean = masked.mean(flat, drawn)
        waited_s = masked.waited_s - before_s
        self._times = IterationTimes(exposed_s=waited_s, communication_s=waited_s)
        self._anchor.wait()
        parts = mean.split([value.numel() for value in shared.values()])
        self._anchor.take(
            {
                name: value + part.view(value.shape)
                for (name, value), part in zip(shared.items(), parts, strict=True)
            }
        )
        self._take_up(self._masks(drawn))

    def _changes(self, drawn: Round) -> dict[str, Tensor]:
        """By name, what this rank has made of the shared values; empty if it takes no part.

        A mean of changes leaves alone what nobody changes, which a mean of values would round.
        """
        if self.world.rank not in drawn.cohort:
            return {}
        return {
            name: self._trained[name].to(value.dtype) - value
            for name, value in self._anchor.shared.items()
        }

    def _masks(self, drawn: Round) -> dict[str, Tensor]:
        """By name, what this rank's values count for; empty if it takes no part."""
        masks, first = {}, 0
        if self.world.rank not in drawn.cohort:
            return {}
        column = drawn.cohort.index(self.world.rank)
        sizes = {"sparsity": self.rule.sparsity, "cohort": self.rule.cohort}
        for name, value in self._anchor.shared.items():
            mask = mask_of(column, first, first + value.numel(), **sizes)
            masks[name] = mask.view(value.shape).to(value.device)
            first += value.numel()
        return masks

    def _average(self, drawn: Round) -> None:
        """All ranks get the average; those of the cohort move their control variates at once."""
        shared, masks = self._anchor.shared, self._masks(drawn)
        changes, weight = self._changes(drawn), self.world.size / self.rule.sparsity
        sent = {}
        for name, value in shared.items():
            parts = [(masks[name], changes[name])] if masks else []
            sent[name] = value + weighted_sum(parts, like=value, weight=weight)
        if self.world.size == 1:
            sent = dict(self._trained)
        self._anchor.start_exchange(tuple(shared), sent)
        self._anchor.wait()
        self._take_up(masks)

    def _take_up(self, masks: Mapping[str, Tensor]) -> None:
        """Move control variates where ``masks`` are set; then go on from what is shared."""
        for name, value in self._anchor.shared.items():
            if name in masks:
                own = self._trained[name].to(value.dtype)
                follow(self.controls[name], value, own, masks[name], self.rule)
            self._trained[name].copy_(value)

    def _close_exchanges(self) -> None:
        super()._close_exchanges()
        if self._masked is not None:
            self._masked.close()

    def _own_tensors(self) -> dict[str, dict[str, Tensor]]:
        return {name: {"control": value} for name, value in self.controls.items()}

    def _fault_of(self, local: Mapping[str, Any]) -> str:
        """Control variates belong to a rank's data, and to a rule."""
        if "rule" not in local:
            return (
                "the state has no control variates; load what state_dict() of a Scaffnew returned"
            )
        found = (local["rule"], local["rank"])
        is_own_size = local["world_size"] == self.world.size
        if is_own_size and found != (repr(self.rule), self.world.rank):
            return (
                f"the state is of rank {found[1]} with {found[0]}, but this is rank "
                f"{self.world.rank} with {self.rule}; load each rank's own state"
            )
        return super()._fault_of(local)

    def _take_own(self, local: Mapping[str, Any], is_own: bool) -> None:
        """On another number of ranks all begin with zeros, whose sum is right, and a new round."""
        self.num_rounds = local["num_rounds"]
        self._steps_in_round = local["steps_in_round"] if is_own else 0
        if not is_own:
            self.param_groups[0]["lr"] = self.rule.lr
        super()._take_own(local, is_own)


class MaskedExchange:
    """The mean of each coordinate over the ``sparsity`` ranks whose masks have it.

    Coordinates are cut into a shard for each rank. A mask keeps the same number of each shard, up
    to one, and follows from its column. So messages have no indices and are equally long; the owner
    of a shard adds them up by rank, and an all-gather brings the means to all. Host memory only.

    waited_s: seconds that this rank has waited so far. traffic: the bytes of an exchange.
    """

    def __init__(self, numel: int, dtype: torch.dtype, rule: RoundRule, world: World) -> None:
        """Ranks are the clients of ``rule``; ``numel`` coordinates (collective)."""
        self._numel, self._rule, self._world = numel, rule, world
        self._shard = -(-numel // world.size)
        most = -(-self._shard * rule.sparsity // rule.cohort)
        self._sent = torch.zeros(world.size, most, dtype=dtype, device="cpu")
        self._arrived = torch.zeros_like(self._sent)
        self._whole = torch.zeros(world.size * self._shard, dtype=dtype, device="cpu")
        self._channel = world.open_channel("masked exchange", window=1)
        itemsize, others = self._sent.itemsize, world.size - 1
        whole = others * self._shard * itemsize
        self.traffic = Traffic(others * most * itemsize, whole, 2 * whole)
        self.waited_s = 0.0

    @torch.no_grad()
    def mean(self, own: Tensor | None, drawn: Round) -> Tensor:
        """The means of a round, 1-D, the same to the bit on all ranks; the next call overwrites it
        (collective). own: this rank's values, 1-D; None if it takes no part.
        """
        start_s = time.perf_counter()
        if own is not None:
            self._pack(own, drawn.cohort.index(self._world.rank))
        self._channel.run("the masked exchange", lambda c: Chain(self._steps(c, drawn)))
        self.waited_s += time.perf_counter() - start_s
        return self._whole[: self._numel]

    def close(self) -> None:
        """Give the channel back (collective)."""
        self._channel.close()

    def _pack(self, own: Tensor, column: int) -> None:
        self._whole[: self._numel].copy_(own)
        for rank, shard in enumerate(self._whole.view(self._world.size, -1)):
            places = self._places(column, rank)
            torch.index_select(shard, 0, places, out=self._sent[rank, : len(places)])

    def _steps(self, collectives: Collectives, drawn: Round) -> Iterator[Request]:
        yield collectives.start_exchange(self._sent.view(-1), self._arrived.view(-1))
        self._add_up(drawn)
        yield collectives.start_all_gather(self._whole)

    @torch.no_grad()
    def _add_up(self, drawn: Round) -> None:
        """This rank's shard of means, of what ranks have sent, in their order."""
        rank = self._world.rank
        self._arrived[rank].copy_(self._sent[rank])
        shard = self._whole.view(self._world.size, -1)[rank].zero_()
        for client in sorted(drawn.cohort):
            places = self._places(drawn.cohort.index(client), rank)
            shard.index_add_(0, places, self._arrived[client, : len(places)])
        shard.div_(self._rule.sparsity)

    def _places(self, column: int, rank: int) -> Tensor:
        """Within the shard of ``rank``, what the client with ``column`` sends."""
        first = rank * self._shard
        rule = self._rule
        mask = mask_of(
            column, first, first + self._shard, sparsity=rule.sparsity, cohort=rule.cohort
        )
        return mask.nonzero()[:, 0]


def _is_plain(config: EngineConfig | None, values: Sequence[Tensor]) -> bool:
    """Whether values travel as they are, in host memory."""
    on_host = all(value.device.type == "cpu" for value in values)
    is_one_kind = len({value.dtype for value in values}) == 1
    is_default = config is None or config == EngineConfig(bucket_cap_mb=config.bucket_cap_mb)
    return on_host and is_one_kind and is_default


def _make_rule(
    lr: float | None, p: float | None, smoothness: tuple[float, float] | None, rule: RoundRule
) -> RoundRule:
    """``rule`` with lr and p as given, or as the functions ask for."""
    sizes = {"num_clients": rule.num_clients, "sparsity": rule.sparsity, "cohort": rule.cohort}
    if smoothness is not None:
        if not isinstance(smoothness, Sequence) or len(smoothness) != 2:
            raise ConfigError(
                f"smoothness is {smoothness!r}; give L and mu of the functions, such as (4.0, 0.1)",
                code="wrong-type",
            )
        found = RoundRule.of_smoothness(*smoothness, **sizes, seed=rule.seed)
        lr, p = found.lr if lr is None else lr, found.p if p is None else p
    if lr is None:
        raise ConfigError(
            "lr is missing; give it, or smoothness=(L, mu) of the functions", code="setting-missing"
        )
    return RoundRule(lr=lr, p=0.1 if p is None else p, **sizes, seed=rule.seed)
