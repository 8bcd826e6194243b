"""Device: which device each rank trains on, why a rank can use none, and how models and batches get
there in their number format.
"""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from glob import glob
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dearmpi.errors import ConfigError, MismatchError
from dearmpi.train.ranks.agreement import AgreedError, AgreeingWorld, together
from dearmpi.train.settings.choices import DeviceSetting, Precision

VISIBLE = "CUDA_VISIBLE_DEVICES"
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_DEVICE_FILES = "/dev/nvidia[0-9]*"
_VERSION_LINE = "nvidia-smi: CUDA Version"
_FITTING_BUILD = "install a build of torch for a CUDA that the driver there can run"


@dataclass(frozen=True, slots=True)
class VisibleGpus:
    """One rank's view.

    num_usable: devices that torch can use. num_counted: devices that torch counts, with or without
    a usable driver. num_shown: device files on the host, which need no CUDA in torch. reason: why
    none can be used, and cure: what to do; else empty.
    """

    num_usable: int
    num_counted: int = 0
    num_shown: int = 0
    reason: str = ""
    cure: str = ""

    @property
    def is_broken(self) -> bool:
        """Whether the rank was given GPUs that torch cannot use."""
        return self.num_counted > self.num_usable

    def describe(self) -> str:
        """The rest of a sentence about a rank that can use no device."""
        number = max(self.num_counted, self.num_shown)
        if not number:
            return f"sees no CUDA device ({self.reason})"
        gpus = "the only GPU" if number == 1 else f"any of the {number} GPUs"
        return f"cannot use {gpus} of its host ({self.reason})"


def look_for_gpus() -> VisibleGpus:
    """Those of this host, as this process sees them."""
    counted, shown = torch.cuda.device_count(), len(glob(_DEVICE_FILES))
    if counted and torch.cuda.is_available():
        return VisibleGpus(counted, counted, shown)
    reason, cure = _explain_none(counted, shown)
    return VisibleGpus(0, counted, shown, reason, cure)


def _explain_none(counted: int, shown: int) -> tuple[str, str]:
    """Why no device can be used, and what to do. counted, shown: as in ``VisibleGpus``."""
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"torch {torch.__version__} is built without CUDA",
            f"install torch's build for CUDA there, no newer than the driver ({_VERSION_LINE})",
        )
    if counted:
        return (
            f"torch {torch.__version__}: {_failure()}",
            f"{_FITTING_BUILD} ({_VERSION_LINE})",
        )
    value = os.environ.get(VISIBLE)
    reason = f"{VISIBLE} is {'not set' if value is None else repr(value)}"
    cure = f"see nvidia-smi and {VISIBLE} there, ask the cluster for GPUs (SLURM: --gpus-per-node)"
    if shown and value != "":
        # Where NVML fails torch counts none that CUDA cannot use: the driver may be the cause too.
        reason += f"; torch {torch.__version__}: {_failure()}"
        cure += f", or {_FITTING_BUILD}"
    return reason, cure


def _failure() -> str:
    """torch's reason why it can use none of the devices."""
    try:
        torch.cuda.init()
    except Exception as error:  # RuntimeError, or what a broken build raises
        return next(iter(str(error).splitlines()), type(error).__name__)
    return "torch.cuda.is_available() is False"


CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


class PlacedWorld(AgreeingWorld, Protocol):
    """What the choice needs of the world."""

    @property
    def hosts(self) -> Sequence[str]: ...

    @property
    def local_rank(self) -> int: ...


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """A device, and why, for people to read.

    warnings: a line for each host whose ranks share devices.
    """

    device: torch.device
    reason: str
    warnings: tuple[str, ...] = ()


def choose_device(world: PlacedWorld, requested: DeviceSetting) -> DeviceChoice:
    """The device of this rank (collective): by its number among the ranks of its host.

    Raises AgreedError or MismatchError, on all ranks alike, where devices are requested, or some
    ranks can use one, and others cannot.
    """
    if requested == "cpu":
        return DeviceChoice(torch.device("cpu"), "as asked")
    own = look_for_gpus()
    gathered = world.all_gather_text(json.dumps(asdict(own)))
    seen = [VisibleGpus(**json.loads(text)) for text in gathered]
    if requested == "auto" and not any(gpus.num_counted for gpus in seen):
        return DeviceChoice(torch.device("cpu"), _explain_host(world, seen))
    if not all(gpus.num_usable for gpus in seen):
        raise _complaint(world, seen, requested)
    device = torch.device("cuda", world.local_rank % own.num_usable)
    with together(world):
        torch.cuda.set_device(device)
        name, number = torch.cuda.get_device_name(device), _serial_number(device)
    users = [json.loads(one) for one in world.all_gather_text(json.dumps([world.host, number]))]
    num_local = world.hosts.count(world.host)
    reason = f"{name}, local rank {world.local_rank} of {num_local}"
    if (sharers := users.count([world.host, number])) > 1:
        reason += f", shared by {sharers} ranks"
    return DeviceChoice(device, reason, find_shared(users))


def find_shared(users: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """A warning for each host with more ranks than devices that they use.

    users: of each rank the host and the number of its device, which no other has.
    """
    used: dict[str, list[str]] = {}
    for host, number in users:
        used.setdefault(host, []).append(number)
    return tuple(
        f"warning: ranks on {host}: {len(numbers)}, devices they train on: {len(set(numbers))}; "
        "those on one device share its memory and its time: start fewer ranks there, or give them "
        "more devices"
        for host, numbers in used.items()
        if len(set(numbers)) < len(numbers)
    )


def allow_deterministic_only(wanted: bool) -> None:
    """Make torch raise for operators that do not repeat bit by bit, or allow them.

    cuBLAS repeats only with workspaces of its own; it looks for them in the environment at its
    first use, and torch raises if they are not there. Those that the user has set stay.
    """
    if wanted:
        os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(wanted)


def _serial_number(device: torch.device) -> str:
    """The device's UUID; its index may stand for another device in another process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _explain_host(world: PlacedWorld, seen: Sequence[VisibleGpus]) -> str:
    """Why tensors are on the host, with the reason of the first rank whose host has GPUs."""
    view = "no rank sees a CUDA device"
    for rank, gpus in enumerate(seen):
        if gpus.num_shown:
            return f"{view}: rank {rank} on {world.hosts[rank]} {gpus.describe()}; {gpus.cure}"
    return view


def _complaint(
    world: PlacedWorld, seen: Sequence[VisibleGpus], requested: DeviceSetting
) -> AgreedError | MismatchError:
    without = [rank for rank, gpus in enumerate(seen) if not gpus.num_usable]
    rank = next((rank for rank in without if seen[rank].is_broken), without[0])
    view = f"rank {rank} on {world.hosts[rank]} {seen[rank].describe()}"
    cure = f"{seen[rank].cure}, leave the host out, or use --device cpu"
    if len(without) == len(seen):
        message = f"device is {requested!r}, but {view}, and no other rank can use one; {cure}"
        return AgreedError(message, exit_code=ConfigError.exit_code, code="no-usable-device")
    other = next(rank for rank, gpus in enumerate(seen) if gpus.num_usable)
    return MismatchError(
        f"{view}, but rank {other} on {world.hosts[other]} sees {seen[other].num_usable}; {cure}",
        code="ranks-differ-in-devices",
    )


def convert_model(model: nn.Module, precision: Precision) -> None:
    """Give the model's parameters the dtype they are trained in: fp64, or as they are."""
    if precision == "fp64":
        model.double()


def convert_batch(batch: Any, precision: Precision) -> Any:
    """The batch with its floating-point tensors in fp64, if that is what the model computes in."""
    if precision != "fp64":
        return batch
    return _map(batch, lambda part: part.double() if part.is_floating_point() else part)


def device_of_model(model: nn.Module) -> torch.device:
    """Where the model's parameters are; the host for a model without any.

    Between two steps this waits for a parameter to be current, as any look at one does.
    """
    return next((param.device for param in model.parameters()), torch.device("cpu"))


def send_batch(batch: Any, device: torch.device) -> Any:
    """The batch on ``device``."""
    return batch if device.type == "cpu" else _map(batch, lambda part: part.to(device))


def _map(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The batch with each of its tensors changed."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return _map_mapping(batch, change)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map(part, change) for part in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(_map(part, change) for part in batch)
    return batch


def _map_mapping(batch: Mapping[Any, Any], change: Callable[[Tensor], Tensor]) -> Any:
    parts = {name: _map(part, change) for name, part in batch.items()}
    if not isinstance(batch, UserDict):  # of other kinds a copy may hold the same items
        return parts
    changed = copy.copy(batch)  # a tokenizer's has attributes beside its items
    changed.update(parts)
    return changed


def computing(device: torch.device, precision: Precision) -> AbstractContextManager[Any]:
    """The context of a feed-forward on ``device``: autocast to half precision, or nothing."""
    if precision not in _HALF:
        return nullcontext()
    return torch.autocast(device.type, dtype=_HALF[precision])


def check_precision(device: torch.device, precision: Precision) -> None:
    """Raise ConfigError where ``device`` cannot compute in ``precision``: a layer is tried."""
    if precision not in _HALF:
        return
    layer = nn.Linear(8, 8, device=device)
    try:
        with warnings.catch_warnings(record=True) as told, computing(device, precision):
            result = layer(torch.ones(1, 8, device=device))
        torch.autograd.backward(result.sum())
        reason = "" if result.dtype == _HALF[precision] else "autocast leaves it out"
        reason = "; ".join(str(one.message) for one in told) if reason and told else reason
    except RuntimeError as error:  # of an operator that the device does not have
        reason = str(error)
    if reason:
        raise ConfigError(
            f"precision is {precision!r}, which {device} cannot compute with: {reason}; use "
            "another precision or device",
            code="precision-unsupported",
        )
