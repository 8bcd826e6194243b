"""Oracle: the same training twice, by one process with plain torch and by all ranks with dearmpi.

Both see the same samples in every step: one process all of them, each rank an uneven share. Losses
are sums over samples divided by the size of the whole batch, times the world size where ranks are
averaged, so that the mean over ranks is the gradient of the whole batch.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

from dearmpi import DistributedOptimizer, EngineConfig
from dearmpi.comm.world import World
from dearmpi.config import ReduceScatter
from tests.mpi.models import NUM_FEATURES, build_model

NUM_STEPS = 6
BATCH = 7  # not a multiple of any world size but 1 (and 7)
MAX_NORM = 0.05
HAS_MUON = hasattr(torch.optim, "Muon")
NO_MUON = f"torch {torch.__version__} has no Muon; torch 2.9 and newer have"
NEEDS_MUON = pytest.mark.skipif(not HAS_MUON, reason=NO_MUON)
REDUCE_SCATTERS = ("ring", *(name for name in get_args(ReduceScatter) if name != "ring"))


@dataclass(frozen=True, slots=True)
class Case:
    """One way to train.

    groups: parameter groups, to which parameters are dealt in turn, so that buckets span groups.
    micro_batches: backprops per step, all but the last within ``no_sync``.
    clip: type of the norm to clip by; None for no clipping.
    """

    model: str = "dense"
    optimizer: str = "sgd"
    groups: int = 1
    schedule: str = "dear"
    gather: str = "parameters"
    shards: Any = "auto"
    reduce_scatter: str = "ring"
    cap_mb: float = 0.0005
    window: int = 2
    eager: bool = False
    micro_batches: int = 1
    clip: float | None = None
    scheduler: str = "none"
    cuda_buffers: str = "auto"
    update_on: str = "device"

    @property
    def is_whole_tensor(self) -> bool:
        """Whether the optimizer needs whole tensors."""
        return self.optimizer in ("muon", "adafactor")

    @property
    def config(self) -> EngineConfig:
        """The engine's settings."""
        return EngineConfig(
            schedule=self.schedule,  # type: ignore[arg-type]
            gather=self.gather,  # type: ignore[arg-type]
            shards=self.shards,
            reduce_scatter=self.reduce_scatter,  # type: ignore[arg-type]
            bucket_cap_mb=self.cap_mb,
            window=self.window,
            eager=self.eager,
            cuda_buffers=self.cuda_buffers,  # type: ignore[arg-type]
            update_on=self.update_on,  # type: ignore[arg-type]
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What training led to; the optimizer's state dict in plain torch form."""

    parameters: dict[str, Tensor]
    optimizer: dict[str, Any]


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8, dampening=0.3, maximize=True),
    "plain": lambda p: torch.optim.SGD(p, lr=0.05),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.02),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(
        p, lr=0.05, lr_decay=0.1, initial_accumulator_value=0.1
    ),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.02, t0=2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "muon": lambda p: _muon()(p, lr=0.02),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02),
}


def _muon() -> Callable[..., Optimizer]:
    if not HAS_MUON:
        pytest.skip(NO_MUON)
    return torch.optim.Muon


def whole_tensor_optimizer(model: torch.nn.Module, lr: float) -> Optimizer:
    """An optimizer that needs whole tensors: Muon with AdamW, and Adafactor before torch 2.9."""
    if HAS_MUON:
        from dearmpi.train.loop.optimizers import MuonWithAdamW, muon_groups  # slow to load

        return MuonWithAdamW(muon_groups(model, list(model.parameters())), lr=lr)
    return torch.optim.Adafactor(model.parameters(), lr=lr)


def build_optimizer(case: Case, model: torch.nn.Module) -> Optimizer:
    """The case's optimizer, with options that differ between its parameter groups."""
    params = list(model.parameters())
    groups = [{"params": params[first :: case.groups]} for first in range(case.groups)]
    optimizer = OPTIMIZERS[case.optimizer](groups)
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] *= 1.0 + number
        if number and "weight_decay" in group:
            group["weight_decay"] = 0.03 * number
    return optimizer


def build_scheduler(case: Case, optimizer: Optimizer) -> Callable[[float], None]:
    """The case's learning rate schedule, as a function of the loss."""
    if case.scheduler == "plateau":
        plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
        return plateau.step
    scheduler: Any = None
    if case.scheduler == "lambda":
        scheduler = LambdaLR(optimizer, lambda step: 1.0 / (1.0 + step))
    elif case.scheduler == "onecycle":
        options = optimizer.param_groups[0]
        cycles = "betas" in options or bool(options.get("momentum"))
        scheduler = OneCycleLR(
            optimizer, max_lr=0.05, total_steps=NUM_STEPS + 1, cycle_momentum=cycles
        )
    return lambda loss: scheduler.step() if scheduler is not None else None


def batch(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The samples of a step, and which of them take a branch: none, the first, all, or some."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, NUM_FEATURES, generator=generator, dtype=torch.float64).to(dtype)
    flags = torch.zeros(BATCH, dtype=torch.bool)
    taken = ([0], [], range(BATCH), [BATCH - 1], [], [1, 5])[step % 6]
    flags[list(taken)] = True
    return inputs, flags


def cut(size: int, parts: int) -> list[slice]:
    """``size`` samples in ``parts`` shares as even as possible."""
    bounds = [part * size // parts for part in range(parts + 1)]
    return [slice(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]


class Training:
    """A model in training: on all ranks of ``world``, or in this process alone if there is none."""

    def __init__(self, case: Case, world: World | None = None) -> None:
        self.case, self.world = case, world
        self.model = build_model(case.model)
        self.optimizer: Any = build_optimizer(case, self.model)
        if world is not None:
            if not world.is_root:  # whoever does not get rank 0's parameters goes astray
                with torch.no_grad():
                    for param in self.model.parameters():
                        param.fill_(0.5)
            self.optimizer = DistributedOptimizer(
                self.optimizer, self.model, world=world, config=case.config
            )
        self.schedule = build_scheduler(case, self.optimizer)

    def __enter__(self) -> Training:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self.world is not None:
            self.optimizer.close()

    def loss(self, step: int, part: slice = slice(None)) -> Any:
        """This rank's share of the loss on ``part`` of the step's samples."""
        inputs, flags = batch(step, self.model.dtype)
        x, y = inputs[part], flags[part]
        if self.world is None:
            return self.model(x, y) / BATCH
        share = cut(len(x), self.world.size)[self.world.rank]
        return self.model(x[share], y[share]) / BATCH * self.world.size

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backprops inside only add up."""
        if self.world is None:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[None] = self.optimizer.no_sync()
        return context

    def backward(self, step: int) -> None:
        """The backprops of a step, one per micro-batch."""
        *others, last = cut(BATCH, self.case.micro_batches)
        for micro_batch in others:
            with self.no_sync():
                self.loss(step, micro_batch).backward()
        self.loss(step, last).backward()

    def clip(self, norm_type: float) -> Tensor:
        """Clip the gradients; returns their norm."""
        if self.world is None:
            return torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM, norm_type)
        norm: Tensor = self.optimizer.clip_grad_norm_(MAX_NORM, norm_type)
        return norm

    def step(self, step: int) -> None:
        """One whole iteration."""
        self.optimizer.zero_grad()
        self.backward(step)
        if self.case.clip is not None:
            self.clip(self.case.clip)
        self.optimizer.step()
        self.schedule(1.0)

    def outcome(self) -> Outcome:
        """Where it stands."""
        return Outcome(copies(self.model), self.optimizer.state_dict())


def train(case: Case, world: World | None = None) -> Outcome:
    """Train; all ranks end equal."""
    with Training(case, world) as training:
        for step in range(NUM_STEPS):
            training.step(step)
        outcome = training.outcome()
    if world is not None:
        assert_equal_on_all_ranks(outcome.parameters, world)
        assert_equal_on_all_ranks(flat_state(outcome.optimizer), world)
        options = world.all_gather_text(repr(outcome.optimizer["param_groups"]))
        assert len(set(options)) == 1, f"ranks differ: {options}"
    return outcome


def compares(case: Case, world: World) -> bool:
    """Whether it is this rank's turn to compare, as ranks end equal bit by bit."""
    return zlib.crc32(repr(case).encode()) % world.size == world.rank


def assert_trains_as_one_process(case: Case, world: World, *, alone: Case | None = None) -> None:
    """Train on all ranks; one of them compares with plain torch, which trains ``alone``."""
    found = train(case, world)
    if compares(case, world):
        assert_same(found, train(alone or case))


def assert_equal_on_all_ranks(tensors: dict[str, Tensor], world: World) -> None:
    """Bit by bit."""
    prints = world.all_gather_text(fingerprint(tensors))
    assert len(set(prints)) == 1, f"ranks differ: {prints}"


def copies(model: torch.nn.Module) -> dict[str, Tensor]:
    """The model's parameters and buffers as they are now."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def fingerprint(tensors: dict[str, Tensor]) -> str:
    """Equal only for tensors that are equal bit by bit."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def flat_state(state_dict: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors and numbers of an optimizer's state dict, by a flat name."""
    return {
        f"{index}.{key}": torch.as_tensor(math.nan if value is None else value)
        for index, entries in state_dict["state"].items()
        for key, value in entries.items()
    }


def assert_same(found: Outcome, expected: Outcome) -> None:
    """Parameters, optimizer state and options equal, up to rounding in the coarsest dtype."""
    exact = all(value.dtype == torch.float64 for value in expected.parameters.values())
    _assert_close(found.parameters, expected.parameters, exact=exact)
    _assert_close(flat_state(found.optimizer), flat_state(expected.optimizer), exact=exact)
    for one, other in zip(
        found.optimizer["param_groups"], expected.optimizer["param_groups"], strict=True
    ):
        assert one == other


def _assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], *, exact: bool) -> None:
    assert found.keys() == expected.keys()
    # The absolute part is for elements that cancel to nearly nothing.
    rtol, atol = (1e-10, 1e-13) if exact else (1e-5, 1e-7)
    for name, value in expected.items():
        scale = max(1.0, float(value.abs().max()))
        try:
            torch.testing.assert_close(  # state may lie on the host, whose parameters do not
                found[name],
                value,
                rtol=rtol,
                atol=atol * scale,
                equal_nan=True,
                check_device=False,
            )
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
