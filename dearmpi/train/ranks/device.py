"""Device: which one each rank trains on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import torch

from dearmpi.errors import ConfigError, MismatchError
from dearmpi.train.ranks.agreement import AgreedError, AgreeingWorld, together
from dearmpi.train.ranks.visible_gpus import VisibleGpus, look_for_gpus
from dearmpi.train.settings.choices import DeviceSetting

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


def choose_device(world: PlacedWorld, asked: DeviceSetting) -> DeviceChoice:
    """The device of this rank (collective): by its number among the ranks of its host.

    Raises AgreedError or MismatchError, on all ranks alike, where devices are asked for, or some
    ranks can use one, and others cannot.
    """
    if asked == "cpu":
        return DeviceChoice(torch.device("cpu"), "as asked")
    own = look_for_gpus()
    told = world.all_gather_text(json.dumps(asdict(own)))
    seen = [VisibleGpus(**json.loads(text)) for text in told]
    if asked == "auto" and not any(gpus.num_counted for gpus in seen):
        return DeviceChoice(torch.device("cpu"), _say_why_none(world, seen))
    if not all(gpus.num_usable for gpus in seen):
        raise _complaint(world, seen, asked)
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
    """Have torch raise where an operator does not repeat bit by bit, or not.

    cuBLAS repeats only with workspaces of its own; it looks for them in the environment at its
    first use, and torch raises if they are not there. Those that the user has set stay.
    """
    if wanted:
        os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(wanted)


def _serial_number(device: torch.device) -> str:
    """What tells a device from others of its host, which may have the same index elsewhere."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _say_why_none(world: PlacedWorld, seen: Sequence[VisibleGpus]) -> str:
    """Why tensors are on the host: first of all that of a rank whose host does have GPUs."""
    said = "no rank sees a CUDA device"
    for rank, gpus in enumerate(seen):
        if gpus.num_shown:
            return f"{said}: rank {rank} on {world.hosts[rank]} {gpus.describe()}; {gpus.cure}"
    return said


def _complaint(
    world: PlacedWorld, seen: Sequence[VisibleGpus], asked: DeviceSetting
) -> AgreedError | MismatchError:
    without = [rank for rank, gpus in enumerate(seen) if not gpus.num_usable]
    rank = next((rank for rank in without if seen[rank].is_broken), without[0])
    said = f"rank {rank} on {world.hosts[rank]} {seen[rank].describe()}"
    cure = f"{seen[rank].cure}, leave the host out, or use --device cpu"
    if len(without) == len(seen):
        message = f"device is {asked!r}, but {said}, and no other rank can use one; {cure}"
        return AgreedError(message, exit_code=ConfigError.exit_code)
    other = next(rank for rank, gpus in enumerate(seen) if gpus.num_usable)
    return MismatchError(
        f"{said}, but rank {other} on {world.hosts[other]} sees {seen[other].num_usable}; {cure}"
    )
