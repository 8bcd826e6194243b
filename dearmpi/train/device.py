"""Device: which one each rank trains on."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from dearmpi.errors import ConfigError, MismatchError
from dearmpi.train.agreement import AgreedError
from dearmpi.train.choices import DeviceSetting

VISIBLE = "CUDA_VISIBLE_DEVICES"
CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


class PlacedWorld(Protocol):
    """What the choice needs of the world."""

    @property
    def rank(self) -> int: ...

    @property
    def hosts(self) -> Sequence[str]: ...

    @property
    def local_rank(self) -> int: ...

    def all_gather_text(self, text: str, /) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """A device, and why, for people to read."""

    device: torch.device
    reason: str


def choose_device(world: PlacedWorld, asked: DeviceSetting) -> DeviceChoice:
    """The device of this rank (collective): by its number among the ranks of its host.

    Raises AgreedError or MismatchError, on all ranks alike, where devices are asked for, or some
    ranks see one, and others see none.
    """
    own = (torch.cuda.device_count(), os.environ.get(VISIBLE))
    seen = [json.loads(text) for text in world.all_gather_text(json.dumps(own))]
    without = [rank for rank, (count, _) in enumerate(seen) if not count]
    if asked == "cpu":
        return DeviceChoice(torch.device("cpu"), "as asked")
    if asked == "auto" and len(without) == len(seen):
        return DeviceChoice(torch.device("cpu"), "no rank sees a CUDA device")
    if without:
        raise _complaint(world, seen, without[0], asked)
    count = own[0]
    index = world.local_rank % count
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    num_local = Counter(world.hosts)[world.hosts[world.rank]]
    sharers = sum(1 for local in range(num_local) if local % count == index)
    reason = f"{torch.cuda.get_device_name(device)}, local rank {world.local_rank} of {num_local}"
    # Where the launcher shows each rank a device of its own, all of them are number 0.
    if sharers > 1 and own[1] is None:
        reason += f", shared by {sharers} ranks"
    return DeviceChoice(device, reason)


def allow_deterministic_only(wanted: bool) -> None:
    """Have torch raise where an operator does not repeat bit by bit, or not.

    cuBLAS repeats only with workspaces of its own; it looks for them in the environment at its
    first use, and torch raises if they are not there. Those that the user has set stay.
    """
    if wanted:
        os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(wanted)


def _complaint(
    world: PlacedWorld,
    seen: Sequence[tuple[int, str | None]],
    rank: int,
    asked: DeviceSetting,
) -> AgreedError | MismatchError:
    visible = seen[rank][1]
    said = f"rank {rank} on {world.hosts[rank]} sees no CUDA device"
    said += f" ({VISIBLE} is {'not set' if visible is None else repr(visible)})"
    cure = f"see nvidia-smi and {VISIBLE} there, leave the host out, or use --device cpu"
    if asked == "cuda" and not any(count for count, _ in seen):
        message = f"device is 'cuda', but {said}, nor does any other; {cure}"
        return AgreedError(message, exit_code=ConfigError.exit_code)
    other = next(rank for rank, (count, _) in enumerate(seen) if count)
    return MismatchError(
        f"{said}, but rank {other} on {world.hosts[other]} sees {seen[other][0]}; {cure}"
    )
