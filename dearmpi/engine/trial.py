"""Trial steps of an optimizer on made-up values, in place of what it is to train."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dearmpi.engine.update import clone

_LEAST_RATE = 1e-2  # of trial steps: a schedule may begin at 0, where any two steps are alike
_SCALES = (1e-3, 1.0, 1e3)  # of made-up gradients: an optimizer may clip those beyond a threshold
_ROW = 4  # numbers in the least row of a trial's tensors


def device_of_optimizer(optimizer: Optimizer) -> torch.device:
    """Where the parameters are: some options are for devices only."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    first = next(params, None)
    return torch.device("cpu") if first is None else first.device


def kinds_of_options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of parameter groups, without those that differ in rates alone."""
    kinds: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        kind = {
            key: bool(value) if isinstance(value, float) else value
            for key, value in options.items()
            if not isinstance(value, Tensor)
        }
        kinds.setdefault(repr(kind), options)
    return list(kinds.values())


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


def try_steps(
    optimizer: Optimizer,
    options: Mapping[str, Any],
    lengths: Sequence[int],
    *,
    shape: tuple[int, ...] | None = None,
    apart: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Three steps of a clone on made-up values, for each kind of gradients; returns the values of
    each in a row, in fp32.
    """
    device = device_of_optimizer(optimizer)
    rows = []
    for drawn in _made_up(sum(lengths)):
        values, *gradients = (row.split(list(lengths)) for row in drawn.to(device, dtype))
        params = [nn.Parameter(piece.clone().view(shape or piece.shape)) for piece in values]
        groups = [[param] for param in params] if apart else [params]
        clones = [
            clone(optimizer, [{**lively(options), "params": group}], defaultdict(dict))
            for group in groups
        ]
        for pieces in gradients:
            for param, gradient in zip(params, pieces, strict=True):
                param.grad = gradient.clone().view_as(param)
            for twin in clones:
                twin.step()
        rows.append(torch.cat([param.detach().reshape(-1).float() for param in params]))
    return torch.stack(rows)


def _made_up(numel: int) -> Iterator[Tensor]:
    """(4, ``numel``): values and three gradients, these small, ordinary and large, and ordinary
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
