"""Scaffnew, CompressedScaffnew and TAMUNA as an optimizer: every rank is a client."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dearmpi.comm.lifecycle import choose_world
from dearmpi.comm.world import World
from dearmpi.config import EngineConfig
from dearmpi.engine.iteration.compilation import untraced
from dearmpi.engine.setup.checks import optimized_parameters
from dearmpi.engine.sync.model_tensors import broadcast_buffers, broadcast_parameters
from dearmpi.errors import CheckpointError, ConfigError, UsageError
from dearmpi.local.anchor import Anchor
from dearmpi.local.client_rounds import follow, mask_of, weighted_sum
from dearmpi.local.sync_settings import compare_ranks
from dearmpi.plan.data.rounds import Round, RoundRule


class Scaffnew(Optimizer):
    """Local gradient steps with control variates, which find the optimum of unequal ranks exactly.

    Each rank takes a random number of steps, the same on all; then ranks go on from the average.
    Its control variates keep it from drifting to the optimum of its own data. With ``sparsity``
    below the number of ranks a coordinate is averaged over that many (CompressedScaffnew); with a
    ``cohort``, so many ranks take part in a round (TAMUNA), and others skip their steps.

    The acceleration is proven for strongly convex functions, not for networks. Noise of batches
    remains, in proportion to ``lr``. Values travel dense in the engine's buckets: masks change what
    is averaged and not the bytes. Ranks must take equal numbers of steps.

    world, rule: the ranks; the settings, with p and lr as they are used. controls: by parameter's
    name, this rank's control variates. num_rounds: rounds that are over.
    """

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
        self.world = choose_world(world)
        size = self.world.size
        cohort = size if cohort is None else cohort
        sparsity = cohort if sparsity is None else sparsity
        self.rule = _make_rule(lr, p, smoothness, RoundRule(size, 1.0, 1.0, sparsity, cohort, seed))
        super().__init__(list(params), {"lr": self.rule.lr})
        if len(self.param_groups) != 1:
            raise _refused("param groups", "give the parameters as one list")
        compare_ranks(self.world, repr(self.rule))
        names = optimized_parameters(self, model)
        self._trained = {
            name: param
            for param, name in names.items()
            if param.is_floating_point() or param.is_complex()
        }
        broadcast_buffers(model, self.world)
        broadcast_parameters(model, self.world)
        self._anchor = Anchor(
            self._trained, world=self.world, lr=1.0, momentum=0.0, config=config or EngineConfig()
        )
        self.controls = {
            name: torch.zeros_like(value, requires_grad=False)
            for name, value in self._anchor.shared.items()
        }
        self.num_rounds = self._steps_in_round = 0
        self._is_closed = False

    @property
    def round(self) -> Round:
        """The one under way."""
        return self.rule.draw(self.num_rounds)

    @property
    def takes_part(self) -> bool:
        """Whether this rank is in the cohort; else it need not compute gradients."""
        return self.world.rank in self.round.cohort

    @torch.no_grad()
    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a local step; the last one of a round exchanges (then collective)."""
        if closure is not None:
            raise _refused("step() with a closure", "call backward() before step()")
        if "found_inf" in vars(self):
            raise _refused("a gradient scaler", "which would skip steps on some ranks alone")
        if self.param_groups[0]["lr"] != self.rule.lr:
            raise _refused(
                f"another lr, {self.param_groups[0]['lr']} after {self.rule.lr}",
                "control variates are of the first one: leave schedulers out",
            )
        if self._is_closed:
            raise UsageError("step() after close(); make a new Scaffnew", code="optimizer-closed")
        drawn = self.round
        if self.world.rank in drawn.cohort:
            for name, param in self._trained.items():
                if param.grad is not None:
                    slope = param.grad - self.controls[name].to(param.dtype)
                    param.sub_(slope, alpha=self.rule.lr)
        self._steps_in_round += 1
        if self._steps_in_round == drawn.num_steps:
            self._exchange(drawn)
            self.num_rounds, self._steps_in_round = self.num_rounds + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """This rank's control variates and place in the round; save it on every rank."""
        return {
            "state": {},
            "param_groups": [{"lr": self.rule.lr, "params": list(range(len(self._trained)))}],
            "scaffnew": {
                "rule": repr(self.rule),
                "rank": self.world.rank,
                "num_rounds": self.num_rounds,
                "steps_in_round": self._steps_in_round,
                "controls": {name: value.clone() for name, value in self.controls.items()},
                "anchor": _copies(self._anchor.shared),
                "parameters": _copies(self._trained),
            },
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from this rank's state. Raises CheckpointError for that of another rank, number of
        ranks or setting: control variates belong to a rank's data.
        """
        saved = state_dict.get("scaffnew", {})
        own = (repr(self.rule), self.world.rank, self.controls.keys())
        if (saved.get("rule"), saved.get("rank"), saved.get("controls", {}).keys()) != own:
            raise CheckpointError(
                f"the state is of rank {saved.get('rank')} with {saved.get('rule')}, but this is "
                f"rank {self.world.rank} with {self.rule}; load each rank's own state on as many "
                "ranks",
                code="state-of-other-model",
            )
        self.num_rounds, self._steps_in_round = saved["num_rounds"], saved["steps_in_round"]
        for values, found in (
            (self.controls, saved["controls"]),
            (self._anchor.shared, saved["anchor"]),
            (self._trained, saved["parameters"]),
        ):
            for name, value in values.items():
                value.copy_(found[name])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused, but for the first."""
        if hasattr(self, "_is_closed"):
            raise _refused("add_param_group()", "close this optimizer and make another")
        super().add_param_group(param_group)

    def join(self) -> NoReturn:
        """Refused: ranks must take equal numbers of steps."""
        raise _refused("join()", "give every rank as many batches")

    def no_sync(self) -> NoReturn:
        """Refused: gradients never travel."""
        raise _refused("no_sync()", "add gradients up by calling backward() several times")

    def close(self) -> None:
        """Give back what the exchange has taken (collective); safe to call twice."""
        if not self._is_closed:
            self._anchor.close()
            self._is_closed = True

    def _exchange(self, drawn: Round) -> None:
        """All ranks get the average; those of the cohort move their control variates at once."""
        rule, shared = self.rule, self._anchor.shared
        takes_part = self.world.rank in drawn.cohort
        sent, masks, first = {}, {}, 0
        for name, value in shared.items():
            last = first + value.numel()
            if takes_part:
                column = drawn.cohort.index(self.world.rank)
                mask = mask_of(column, first, last, sparsity=rule.sparsity, cohort=rule.cohort)
                masks[name] = mask.view(value.shape).to(value.device)
            first = last
            parts = [(masks[name], self._trained[name].to(value.dtype))] if takes_part else []
            sent[name] = weighted_sum(parts, like=value, weight=self.world.size / rule.sparsity)
        self._anchor.start_exchange(tuple(shared), sent)
        self._anchor.wait()
        for name, value in self._anchor.shared.items():
            if takes_part:
                own = self._trained[name].to(value.dtype)
                follow(self.controls[name], value, own, masks[name], rule)
            self._trained[name].copy_(value)


# A scaler then leaves the decision to skip a step to step(), which refuses it.
Scaffnew._step_supports_amp_scaling = True  # type: ignore[attr-defined]


def _make_rule(
    lr: float | None, p: float | None, smoothness: tuple[float, float] | None, rule: RoundRule
) -> RoundRule:
    """``rule`` with lr and p as given, or as the functions ask for."""
    sizes = {"num_clients": rule.num_clients, "sparsity": rule.sparsity, "cohort": rule.cohort}
    if smoothness is not None:
        found = RoundRule.of_smoothness(*smoothness, **sizes, seed=rule.seed)
        lr, p = found.lr if lr is None else lr, found.p if p is None else p
    if lr is None:
        raise ConfigError(
            "lr is missing; give it, or smoothness=(L, mu) of the functions", code="setting-missing"
        )
    return RoundRule(lr=lr, p=0.1 if p is None else p, **sizes, seed=rule.seed)


def _refused(what: str, cure: str) -> UsageError:
    return UsageError(f"Scaffnew has no {what}: {cure}", code="local-steps-forbid")


def _copies(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in params.items()}
