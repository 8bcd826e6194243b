"""Options of an optimizer as updates read them, and whether all ranks have built the same model,
optimizer and settings; if not, what differs.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import fields
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dearmpi.comm.messages.collective_calls import digest, first_difference
from dearmpi.comm.world import World
from dearmpi.config import EngineConfig
from dearmpi.engine import usage_errors
from dearmpi.engine.probe.steadiness import changed_option, count, counts
from dearmpi.engine.sync.model_tensors import describe, model_tensors
from dearmpi.engine.update.update import Options, read_options
from dearmpi.errors import MismatchError
from dearmpi.plan.data.layout import BucketLayout
from dearmpi.plan.data.schedule import Schedule


class OptionReader:
    """Gives the updates of each iteration the options that ``optimizer`` has."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._counts = counts(optimizer)

    def read(self) -> Options:
        """The options of this moment, before an iteration's first update."""
        return read_options(self._optimizer)

    def confirm(self, earlier: Options) -> None:
        """Raise UsageError unless ``earlier``, by which updates may have been made, still hold."""
        if changed := find_changed_option(earlier, self._optimizer):
            raise usage_errors.set_late(changed)

    def count(self, options: Options) -> None:
        """A step with ``options`` is about to be taken: set what the optimizer counts in its groups
        to what that leaves there.
        """
        if not self._counts:
            return
        after = count(self._optimizer, options)
        for group, before, counted in zip(
            self._optimizer.param_groups, options, after, strict=True
        ):
            while (key := changed_option(counted, before)) is not None:
                group[key] = counted[key]
                before = {**before, key: counted[key]}


def describe_options(optimizer: Optimizer) -> list[str]:
    """A line for each option of each param group, such as ``lr 0.1 in param group 0``.

    Equal values make equal lines: ``1`` and ``1.0``, a tensor and its number, a tuple and a list.
    What has no value that another process could compare, such as a function, is left out.
    """
    return [
        f"{name} {text} in param group {number}"
        for number, group in enumerate(read_options(optimizer))
        for name in sorted(group)
        if (text := _describe(group[name])) is not None
    ]


def describe_state(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> list[str]:
    """A line for each entry of the state, such as ``step 5 of fc.weight`` and ``exp_avg of shape
    (3, 4) and float32 with checksum 8c8a7f52 of fc.weight``; ``names``: of the parameters.

    Of a parameter, single numbers come first: another step tells more than another checksum.
    """
    return [
        f"{key} {text} of {name}"
        for param, name in names.items()
        for key, value in sorted(optimizer.state.get(param, {}).items(), key=_numbers_first)
        if (text := _describe_entry(value)) is not None
    ]


def _numbers_first(entry: tuple[Any, Any]) -> tuple[bool, str]:
    key, value = entry
    return isinstance(value, Tensor) and value.ndim > 0, str(key)


def find_changed_option(earlier: Options, optimizer: Optimizer) -> str:
    """The first option that is another than ``earlier``, such as ``lr in param group 0``; empty if
    none is. Tensors on a device are not compared, since that would wait for it.
    """
    for number, (before, group) in enumerate(zip(earlier, optimizer.param_groups, strict=True)):
        for name, value in before.items():
            now = group.get(name)
            if now is not value and _differ(value, now):
                return f"{name} in param group {number}"
    return ""


def _differ(before: Any, now: Any) -> bool:
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        if not before.device.type == now.device.type == "cpu":
            return False
        alike = before.shape == now.shape and before.dtype == now.dtype
        return not (alike and torch.allclose(before, now, rtol=0, atol=0, equal_nan=True))
    if isinstance(before, (list, tuple)) and isinstance(now, (list, tuple)):
        return len(before) != len(now) or any(map(_differ, before, now))
    try:
        return bool(before != now) and not (before != before and now != now)  # NaN is the same
    except (RuntimeError, ValueError):  # arrays, whose comparison has no truth value
        return True


def _describe_entry(value: Any) -> str | None:
    if isinstance(value, Tensor) and value.ndim:
        dtype = str(value.dtype).removeprefix("torch.")
        checksum = _checksum(value)
        return f"of shape {tuple(value.shape)} and {dtype} with checksum {checksum:08x}"
    return _describe(value)


def _checksum(tensor: Tensor) -> int:
    """Of the elements, in whatever order they lie in memory."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
    # What counts as contiguous may have strides, such as a single element.
    flat = flat.clone(memory_format=torch.contiguous_format) if flat.stride() != (1,) else flat
    return zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0


def _describe(value: Any) -> str | None:
    if isinstance(value, Tensor):
        return _describe(value.tolist())
    if isinstance(value, (list, tuple)):
        items = [_describe(item) for item in value]
        return None if None in items else f"({', '.join(map(str, items))})"
    if value is None or isinstance(value, (bool, str)):
        return repr(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, Real):
        number = float(value)
        return str(int(number) if number.is_integer() else number)
    return None


def check_alike(
    world: World,
    optimizer: Optimizer,
    model: nn.Module,
    names: Mapping[nn.Parameter, str],
    *,
    config: EngineConfig,
    layout: BucketLayout,
    schedule: Schedule,
) -> None:
    """Raise MismatchError unless all ranks have the same model, optimizer and settings, with the
    first that differs (collective). ``names``: of the parameters under the optimizer; the model's
    other parameters and its buffers are compared as well.

    State counts too: where rank 0 alone has loaded it, the others would begin without.
    """
    facts = {
        "setting": [f"{name}={value!r}" for name, value in _settings_of(config).items()],
        "model": [_describe_param(param, name) for param, name in names.items()],
        "parameter or buffer outside the optimizer": _describe_others(model, names),
        "layout": [f"bucket {b.index} with {len(b.placements)} parameters" for b in layout],
        "optimizer": _describe_optimizer(optimizer, names),
        "optimizer option": describe_options(optimizer),
        "optimizer state": describe_state(optimizer, names),
        "schedule": _describe_schedule(schedule),
    }
    own = json.dumps([digest(lines) for lines in facts.values()])
    texts = [json.loads(text) for text in world.all_gather_text(own)]
    for (what, lines), seen in zip(facts.items(), zip(*texts, strict=True), strict=True):
        if len(set(seen)) > 1:
            _refuse(world, what, first_difference(lines, world.all_gather_text))


def _settings_of(config: EngineConfig) -> dict[str, Any]:
    """By name; ``check_every`` as the environment of this rank completes it."""
    settings = {field.name: getattr(config, field.name) for field in fields(config)}
    return {**settings, "check_every": config.steps_between_checks}


def _refuse(world: World, what: str, seen: Sequence[str]) -> None:
    rank = next(rank for rank, line in enumerate(seen) if line != seen[0])
    owner = "model" if "outside" in what else "optimizer"
    raise MismatchError(
        f"rank {rank} on {world.hosts[rank]} has another {what} than rank 0 on {world.hosts[0]}: "
        f"its {owner} has {seen[rank]} where rank 0's has {seen[0]}; every rank must build, and "
        "load, the same",
        code="ranks-built-differently",
    )


def _describe_param(param: nn.Parameter, name: str) -> str:
    return f"{name} {describe(param, note='' if param.requires_grad else ', frozen')}"


def _describe_others(model: nn.Module, params: Container[nn.Parameter]) -> list[str]:
    return [
        f"{kind} {name} {describe(tensor)}"
        for kind, name, tensor in model_tensors(model)
        if tensor not in params
    ]


def _describe_schedule(schedule: Schedule) -> list[str]:
    order = [
        f"RS{bucket} at place {place}" for place, bucket in enumerate(schedule.reduce_scatters)
    ]
    gathers = [f"AG{gather.bucket} after RS{gather.after}" for gather in schedule.all_gathers]
    return [schedule.name, schedule.launch.value, schedule.wait.value, *order, *gathers]


def _describe_optimizer(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> list[str]:
    """Its type, then a line for each parameter in a group."""
    groups = enumerate(optimizer.param_groups)
    return [
        f"the type {type(optimizer).__name__}",
        *(
            f"{names[param]} in param group {number}"
            for number, group in groups
            for param in group["params"]
            if param in names
        ),
    ]
