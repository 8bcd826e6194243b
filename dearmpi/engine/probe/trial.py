"""Trial steps of an optimizer on made-up values, in place of what it is to train."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dearmpi.engine.update.update import Options, clone, read_options, step_on

_LEAST_RATE = 1e-2  # of trial steps: a schedule may begin at 0, where any two steps are alike
_SCALES = (1.0, 1e-3, 1e3)  # of made-up gradients: an optimizer may clip those beyond a threshold
_ROW = 4  # numbers in the least row of a trial's tensors


class TrialBucket:
    """Made-up values, given to an optimizer as buckets give theirs: as plain views of one buffer,
    with gradients in views of another, which the next ones overwrite.

    values: the buffer, of which a model's parameters would be views; steps change it. members: what
        an optimizer is given of it.
    """

    def __init__(
        self, values: Tensor, lengths: Sequence[int], shape: tuple[int, ...] | None = None
    ) -> None:
        """``lengths``: numbers in each member. ``shape``: theirs; None for 1-D ones."""
        self._lengths, self._shape = list(lengths), shape
        self.values = values
        self.members = self._cut(self.values)
        self._gradients = torch.zeros_like(self.values)

    def fill(self, gradients: Tensor, *, anew: bool = False) -> None:
        """Give the members their next gradients; ``anew``: in memory of their own, as in torch."""
        if anew:
            self._gradients = torch.zeros_like(self._gradients)
        self._gradients.copy_(gradients)
        for member, gradient in zip(self.members, self._cut(self._gradients), strict=True):
            member.grad = gradient

    def train(self, optimizer: Optimizer, gradient: float) -> None:
        """A step with the options of the first group, where every ``gradient`` is the same."""
        self.fill(torch.full_like(self.values, gradient))
        step_uncompiled(optimizer, read_options(optimizer), {0: self.members})

    def is_moved(self) -> bool:
        """Whether a member has other memory than it was given."""
        places = [piece.data_ptr() for piece in self._cut(self.values)]
        return places != [member.data_ptr() for member in self.members]

    def _cut(self, buffer: Tensor) -> list[Tensor]:
        pieces = buffer.split(self._lengths)
        return [piece.view(self._shape or piece.shape).detach() for piece in pieces]


def step_uncompiled(
    optimizer: Optimizer, options: Options, members: Mapping[int, Sequence[Tensor]]
) -> None:
    """``step_on``, with arithmetic that is under ``torch.compile`` as it is: the shapes of trials
    would use up the recompilations that torch allows a function.
    """
    with torch.compiler.set_stance("force_eager"):
        step_on(optimizer, options, members)


def device_of_optimizer(optimizer: Optimizer) -> torch.device:
    """Where the parameters are: some options are for devices only."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    first = next(params, None)
    return torch.device("cpu") if first is None else first.device


def kinds_of_options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of parameter groups, without those that differ in rates or names alone."""
    kinds: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        options = in_training(optimizer, group)
        kinds.setdefault(kind_of(options), options)
    return list(kinds.values())


def kind_of(options: Mapping[str, Any]) -> str:
    """The same text for options that differ in rates or names alone."""
    return repr(
        {
            key: bool(value) if isinstance(value, float) else value
            for key, value in options.items()
            if key != "param_names" and not isinstance(value, Tensor)
        }
    )


def in_training(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of ``group`` while it trains: an optimizer that has a ``train()``, such as a
    schedule-free one, may keep in them whether it was called.
    """
    options = {key: value for key, value in group.items() if key != "params"}
    train = getattr(type(optimizer), "train", None)
    if not callable(train):
        return options
    twin = clone(optimizer, [{**options, "params": []}], defaultdict(dict))
    train(twin)
    return {key: value for key, value in twin.param_groups[0].items() if key != "params"}


def lively(options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` with a learning rate at which steps that differ lead to values that do."""
    rate = options.get("lr")
    if isinstance(rate, Tensor):
        return {**options, "lr": rate.clamp(min=_LEAST_RATE)}
    return (
        {**options, "lr": max(rate, _LEAST_RATE)}
        if isinstance(rate, (int, float))
        else dict(options)
    )


class FirstState(dict[Tensor, dict[str, Any]]):
    """The state of made-up tensors before their first step, as the constructor makes it.

    Most optimizers begin without state; Adagrad up to torch 2.11 fills it when it is made.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        self._template = _constructed_state(optimizer) if optimizer.state else {}

    def __missing__(self, param: Tensor) -> dict[str, Any]:
        self[param] = entry = {
            key: _refill(value, param) if isinstance(value, Tensor) else value
            for key, value in self._template.items()
        }
        return entry


def _constructed_state(optimizer: Optimizer) -> Mapping[str, Any]:
    """What an optimizer of this class and these options has of a parameter when it is made.

    Empty where the class cannot be made by its options.
    """
    param = torch.zeros(_ROW, device=device_of_optimizer(optimizer), requires_grad=True)
    known = inspect.signature(type(optimizer).__init__).parameters
    options = {key: value for key, value in optimizer.defaults.items() if key in known}
    try:
        made = type(optimizer)([param], **options)
    except Exception:  # a class of the user's own, of which nothing is known
        return {}
    state: Mapping[str, Any] = made.state.get(param, {})
    return state


def _refill(value: Tensor, param: Tensor) -> Tensor:
    """``value``, of another parameter, for ``param``: its one number in each element, or a copy."""
    if value.dim() == 0:
        return value.clone()
    return torch.full_like(param, value.flatten()[0].item(), dtype=value.dtype)


def try_steps(
    optimizer: Optimizer,
    options: Mapping[str, Any],
    lengths: Sequence[int],
    *,
    shape: tuple[int, ...] | None = None,
    apart: bool = False,
    anew: bool = False,
    ordinary: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Three steps of a clone on made-up values, for each kind of gradients, or for ``ordinary``
    ones alone; returns the values of each in a row, in fp32. ``apart``: each tensor by a clone of
    its own; ``anew`` as in ``fill``.
    """
    device = device_of_optimizer(optimizer)
    rows = []
    for drawn in islice(_made_up(sum(lengths)), 1 if ordinary else None):
        values, *gradients = drawn.to(device, dtype)
        bucket = TrialBucket(values, lengths, shape)
        groups = [[member] for member in bucket.members] if apart else [bucket.members]
        clones = [clone(optimizer, [lively(options)], FirstState(optimizer)) for _ in groups]
        for gradient in gradients:
            bucket.fill(gradient, anew=anew)
            for twin, group in zip(clones, groups, strict=True):
                step_uncompiled(twin, read_options(twin), {0: group})  # as it has counted on
        rows.append(bucket.values.float())
    return torch.stack(rows)


def first_state(
    optimizer: Optimizer, group: Mapping[str, Any], shape: tuple[int, ...]
) -> tuple[Tensor, Mapping[str, Any]]:
    """A made-up tensor, and its state after a first step as one of ``group``."""
    values = torch.zeros(prod(shape), device=device_of_optimizer(optimizer))
    bucket = TrialBucket(values, [len(values)], shape)
    twin = clone(optimizer, [in_training(optimizer, group)], FirstState(optimizer))
    bucket.train(twin, 1.0)
    (param,) = bucket.members
    return param, twin.state[param]


def _made_up(numel: int) -> Iterator[Tensor]:
    """(4, ``numel``): values and three gradients, these ordinary, small and large. Then ordinary
    ones at right angles to each row of the values, as where a normalisation follows a layer.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(4, numel, generator=generator, device="cpu")
    for scale in _SCALES:
        scaled = drawn * scale
        scaled[0] = drawn[0] * min(scale, 1.0)  # else small ones would hardly move what they meet
        yield scaled
    rows = drawn.view(4, -1, _ROW)
    along = rows[0] / rows[0].norm(dim=1, keepdim=True)
    across = rows - (rows * along).sum(2, keepdim=True) * along
    yield torch.cat([drawn[:1], across[1:].flatten(1)])


def are_alike(one: Tensor, other: Tensor) -> bool:
    """Whether rows are the same up to rounding, which is that of the largest in each."""
    largest = one.abs().amax(1).nan_to_num(0.0, 0.0).tolist()
    return all(
        torch.allclose(row, like, atol=1e-6 * most, equal_nan=True)
        for row, like, most in zip(one, other, largest, strict=True)
    )
