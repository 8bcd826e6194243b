"""Optimizers by their name in torch.optim or of the user's own, and the learning rate over a run.

The learning rate is a pure function of the step, so there is no state to save.

Muon updates the matrices of hidden layers, and AdamW all other parameters, as Muon's authors use
it: embeddings, the last layer, and what is no matrix, have other best steps (K. Jordan and others,
2024). Both share one learning rate and weight decay, since Muon's steps are scaled to the size of
AdamW's (J. Liu and others, 2025), unless ``adjust_lr_fn`` says otherwise.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dearmpi.config import known_names
from dearmpi.engine.update.update import step_clone
from dearmpi.errors import TaskError
from dearmpi.train.settings.choices import LrSchedule, NoDecay
from dearmpi.train.settings.settings import RunSettings
from dearmpi.train.tasks.own_code import load_own

# LBFGS calls the model several times a step; SparseAdam takes gradients that are no dense tensors.
UNSUITED = ("LBFGS", "SparseAdam")
FROM_FLAGS = ("lr", "momentum", "weight_decay")


@dataclass(frozen=True, slots=True)
class OptimizerChoice:
    """An optimizer class, the arguments to make it with, and the name to choose it by."""

    kind: type[torch.optim.Optimizer]
    arguments: Mapping[str, Any]
    name: str

    @property
    def lr(self) -> float:
        """The learning rate, torch's own default where none was chosen."""
        return float(self.arguments["lr"])

    def build_for(
        self, model: nn.Module, no_decay: Collection[NoDecay] | None
    ) -> torch.optim.Optimizer:
        """Make it for the trained parameters of ``model``; of ``Muon``, which takes matrices alone,
        AdamW has the others. Raises TaskError as ``build`` and ``parameter_groups`` do.
        """
        groups = parameter_groups(model, no_decay)
        if self.kind is not getattr(torch.optim, "Muon", None):
            return self.build(groups)
        return replace(self, kind=MuonWithAdamW).build(muon_groups(model, groups))

    def build(self, parameters: Iterable[nn.Parameter | dict[str, Any]]) -> torch.optim.Optimizer:
        """Make it for ``parameters`` or their groups. Raises TaskError, with its reason, where it
        cannot be.
        """
        try:
            given: list[Any] = list(parameters)
            return self.kind(given, **self.arguments)
        except Exception as error:  # a class of the user's may raise anything
            raise TaskError(
                f"optimizer {self.kind.__name__} cannot be made: {error}",
                code="optimizer-not-built",
            ) from error


def known_optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    """Optimizers of torch.optim that can train with one gradient per step, by name."""
    return {
        name: kind
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
        and name not in UNSUITED
    }


def choose_optimizer(settings: RunSettings) -> OptimizerChoice:
    """The optimizer that ``settings`` name.

    Raises TaskError for a name that torch.optim does not have, and for an option that the
    optimizer does not take.
    """
    kind, name = find_optimizer(settings.optimizer)
    accepted = inspect.signature(kind).parameters
    takes_all = any(option.kind is option.VAR_KEYWORD for option in accepted.values())
    arguments = dict(settings.optimizer_options)
    for flag in FROM_FLAGS:
        value = getattr(settings, flag)
        if value is None:
            continue
        if flag in arguments:
            raise TaskError(
                f"{flag} is given twice, as --{flag.replace('_', '-')} {value} and as "
                f"--optimizer-option {flag}={arguments[flag]}; give it once",
                code="given-twice",
            )
        arguments[flag] = value
    options = [option for option in accepted if option != "params"]
    needed = [*arguments, *(["weight_decay"] if settings.no_decay else [])]
    for option in needed:
        if option not in options and not takes_all:
            shown = option if option in arguments else "no_decay"
            raise TaskError(
                f"{shown} has no effect: {kind.__name__} has no such option"
                f"{known_names(option, options)}",
                code="setting-without-effect",
            )
    if settings.no_decay and "weight_decay" not in arguments:
        _check_decays(accepted, name)
    if "lr" not in arguments:
        arguments["lr"] = _default_lr(accepted, name)
    return OptimizerChoice(kind, arguments, name)


def _check_decays(accepted: Mapping[str, inspect.Parameter], name: str) -> None:
    """Raise TaskError for an optimizer that by itself decays no parameter."""
    if "weight_decay" in accepted and accepted["weight_decay"].default in (0, None):
        raise TaskError(
            f"no_decay has no effect: {name} has no weight decay by itself; give --weight-decay, "
            "or leave no_decay out",
            code="setting-without-effect",
        )


def _default_lr(accepted: Mapping[str, inspect.Parameter], name: str) -> float:
    """The learning rate that an optimizer has by itself."""
    try:
        return float(accepted["lr"].default)
    except (KeyError, TypeError, ValueError) as error:
        raise TaskError(
            f"optimizer {name} has no learning rate of its own; give --lr",
            code="optimizer-not-built",
        ) from error


def parameter_groups(
    model: nn.Module, no_decay: Collection[NoDecay] | None
) -> Sequence[nn.Parameter | dict[str, Any]]:
    """The trained parameters of ``model``, for an optimizer to be made of: a list, or two groups
    of which the second has no weight decay.

    no_decay: ``norms``, all parameters of layers whose class is called a norm; ``biases``, those
    with ``bias`` in the last part of their name. Raises TaskError where the model has none.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not no_decay:
        return list(trained.values())
    norms = {
        id(parameter)
        for module in model.modules()
        if "norm" in type(module).__name__.lower()
        for parameter in module.parameters(recurse=False)
    }
    free, rest = list[nn.Parameter](), list[nn.Parameter]()
    for name, parameter in trained.items():
        is_bias = "biases" in no_decay and "bias" in name.rpartition(".")[2]
        is_free = is_bias or ("norms" in no_decay and id(parameter) in norms)
        (free if is_free else rest).append(parameter)
    if not free:
        raise TaskError(
            f"no_decay has no effect: the model has no {' and no '.join(no_decay)}; leave it out",
            code="setting-without-effect",
        )
    groups: list[dict[str, Any]] = [{"params": free, "weight_decay": 0.0}]
    return [{"params": rest}, *groups] if rest else groups


def find_optimizer(name: str) -> tuple[type[torch.optim.Optimizer], str]:
    """The class that ``name`` means, and the name by which it is found again.

    Raises TaskError where there is none, or it is no optimizer.
    """
    if ":" in name:
        found: Any = load_own(name, noun="optimizer")
        if not (inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)):
            raise TaskError(
                f"optimizer {name} is not a class of torch.optim.Optimizer's kind; name one",
                code="unknown-choice",
            )
        return found, name
    kind = _find(name)
    return kind, kind.__name__


def _find(name: str) -> type[torch.optim.Optimizer]:
    known = known_optimizers()
    by_lower = {key.lower(): kind for key, kind in known.items()}
    if name.lower() in by_lower:
        return by_lower[name.lower()]
    if name.lower() in (other.lower() for other in UNSUITED):
        raise TaskError(
            f"optimizer {name} cannot be used: it needs more than one dense gradient per step; "
            f"choose one of {', '.join(sorted(known))}",
            code="optimizer-not-built",
        )
    raise TaskError(
        f"unknown optimizer {name!r}{known_names(name, sorted(known))}; one of your own is "
        "package.module:Class or FILE.py:Class",
        code="unknown-choice",
    )


MILESTONES = (0.5, 0.75)
GAMMA = 0.1


@dataclass(frozen=True, slots=True)
class LrCurve:
    """Factor on the base learning rate at each step.

    It rises in equal parts over ``warmup_steps``, the last of which has the full rate. Then it
    stays (``constant``) or falls to zero along half a cosine (``cosine``). With ``step`` it is
    multiplied by ``gamma`` after each of ``milestones``, which are shares of ``total_steps``.
    With ``own``, a function of the step and ``total_steps``, the factor is what that returns.
    """

    kind: LrSchedule | str
    total_steps: int
    warmup_steps: int = 0
    milestones: tuple[float, ...] = MILESTONES
    gamma: float = GAMMA
    own: Callable[[int, int], float] | None = None

    @property
    def notes(self) -> list[str]:
        """A line for people where the run ends before the warm-up does."""
        if self.warmup_steps <= self.total_steps:
            return []
        return [
            f"the learning rate rises over {self.warmup_steps} steps, but the run has "
            f"{self.total_steps}: it ends at {100 * self.total_steps / self.warmup_steps:.3g}% of "
            "--lr, and no schedule follows; give fewer --warmup-steps, or train longer"
        ]

    def factor(self, step: int) -> float:
        """The factor of step number ``step``, from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.own is not None:
            return self._own_factor(self.own, step)
        match self.kind:
            case "constant":
                return 1.0
            case "cosine":
                rest = max(1, self.total_steps - self.warmup_steps)
                share = min(1.0, (step - self.warmup_steps) / rest)
                return 0.5 * (1.0 + math.cos(math.pi * share))
            case "step":
                # A share such as 0.55 of 100 steps is a hair above 55 in binary.
                passed = sum(step >= share * self.total_steps - 1e-6 for share in self.milestones)
                return float(self.gamma**passed)
        raise AssertionError(f"lr_schedule {self.kind} is none of the choices")

    def _own_factor(self, own: Callable[[int, int], float], step: int) -> float:
        try:
            factor = float(own(step, self.total_steps))
        except Exception as error:
            raise TaskError(
                f"lr-schedule {self.kind} failed at step {step} of {self.total_steps}: "
                f"{type(error).__name__}: {error}",
                code="task-code-failed",
            ) from error
        if not math.isfinite(factor) or factor < 0:
            raise TaskError(
                f"lr-schedule {self.kind} returned {factor} for step {step} of "
                f"{self.total_steps}; return a factor on --lr, 0 or above",
                code="out-of-range",
            )
        return factor


def lr_curve(settings: RunSettings, *, total_steps: int, steps_per_epoch: int) -> LrCurve:
    """The curve that ``settings`` describe."""
    warmup_steps = settings.warmup_steps or 0
    if settings.warmup_epochs is not None:
        warmup_steps = round(settings.warmup_epochs * steps_per_epoch)
    schedule = settings.lr_schedule
    own = load_own(schedule, noun="lr-schedule") if ":" in schedule else None
    return LrCurve(
        schedule,
        total_steps,
        warmup_steps,
        MILESTONES if settings.lr_milestones is None else settings.lr_milestones,
        GAMMA if settings.lr_gamma is None else settings.lr_gamma,
        own,
    )


_SHARED = ("lr", "weight_decay")
_LIKE_ADAMW = "match_rms_adamw"


class MuonWithAdamW(Optimizer):
    """Updates each param group by the optimizer that its ``kind`` names, ``muon`` or ``adamw``.

    State and options are those of ``torch.optim.Muon`` and ``torch.optim.AdamW``.
    """

    def __init__(self, params: Sequence[dict[str, Any]], **options: Any) -> None:
        """``params``: groups with a ``kind``. ``options``: Muon's; AdamW has its learning rate and
        weight decay, and its own defaults.
        """
        matrix, vector = torch.zeros(1, 1), torch.zeros(1)
        muon = torch.optim.Muon([matrix], **{"adjust_lr_fn": _LIKE_ADAMW, **options})
        shared = {key: muon.defaults[key] for key in _SHARED}
        self._kinds: dict[str, Optimizer] = {
            "muon": muon,
            "adamw": torch.optim.AdamW([vector], **shared),
        }
        groups = [{**self._kinds[group["kind"]].defaults, **group} for group in params]
        super().__init__(groups, shared)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for kind, optimizer in self._kinds.items():
            groups = [group for group in self.param_groups if group["kind"] == kind]
            if any(param.grad is not None for group in groups for param in group["params"]):
                step_clone(optimizer, groups, self.state)
        return loss


def muon_groups(
    model: nn.Module, groups: Sequence[nn.Parameter | dict[str, Any]]
) -> list[dict[str, Any]]:
    """``groups``, of parameters of ``model`` or a list of them, each in two by ``kind``: hidden
    matrices, and the rest.

    Raises TaskError for a model without hidden matrices.
    """
    hidden = hidden_matrices(model)
    parted: list[dict[str, Any]] = []
    for group in _as_groups(groups):
        for kind, is_hidden in (("muon", True), ("adamw", False)):
            members = [param for param in group["params"] if (id(param) in hidden) == is_hidden]
            if members:
                parted.append({**group, "params": members, "kind": kind})
    if not any(group["kind"] == "muon" for group in parted):
        raise TaskError(
            "optimizer Muon is for the matrices of hidden layers, and the model has none that are "
            "trained: embeddings, its last layer, filters and vectors are not among them; use "
            "AdamW",
            code="optimizer-not-built",
        )
    return parted


def hidden_matrices(model: nn.Module) -> set[int]:
    """The ids of the parameters with two dimensions, less those of embeddings and of the last
    linear layer, also where another layer shares them.
    """
    modules = list(model.modules())
    linear = [module.weight for module in modules if isinstance(module, nn.Linear)]
    left_out = {
        id(module.weight)
        for module in modules
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    left_out |= {id(weight) for weight in linear[-1:]}
    matrices = {id(param) for param in model.parameters() if param.dim() == 2}
    return matrices - left_out


def _as_groups(groups: Sequence[nn.Parameter | dict[str, Any]]) -> list[Mapping[str, Any]]:
    if groups and isinstance(groups[0], Mapping):
        return [group for group in groups if isinstance(group, Mapping)]
    return [{"params": list(groups)}]
