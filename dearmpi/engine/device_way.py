"""Device way: how a device's tensors get to MPI, chosen for all ranks alike."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from torch import nn

from dearmpi.comm.world import World
from dearmpi.engine.device import device_of
from dearmpi.engine.side_stream import DeviceSideStream, HostSideStream, SideStream
from dearmpi.engine.staging import StagedCollectives
from dearmpi.errors import MismatchError
from dearmpi.plan.layout import BucketLayout


def open_side_stream(
    params: Iterable[nn.Parameter], *, world: World, layout: BucketLayout, window: int
) -> SideStream:
    """The side stream of the device that holds ``params``.

    Raises ConfigError for parameters on several devices, or on one that is not served.
    """
    device = device_of(params)
    if device is None:
        return HostSideStream()
    most_bytes = max(bucket.nbytes for bucket in layout)
    carry = partial(StagedCollectives, window=window, most_bytes=most_bytes)
    return DeviceSideStream(device, carry)


def check_devices(world: World, params: Iterable[nn.Parameter]) -> None:
    """Raise MismatchError unless all ranks have their parameters on one kind of device
    (collective), and ConfigError unless this rank has them on one.
    """
    device = device_of(params)
    name = "the host" if device is None else device.name
    seen = world.all_gather_text(name)
    kinds = ["cpu" if other == "the host" else "device" for other in seen]
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise MismatchError(
                f"rank {rank} on {world.hosts[rank]} has its parameters on {seen[rank]}, rank 0 on "
                f"{world.hosts[0]} on {seen[0]}; train on devices everywhere, or nowhere"
            )
