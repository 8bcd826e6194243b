"""torch.distributed over gloo inside an MPI job; the addresses travel through the World."""

from __future__ import annotations

import ctypes
import gc
import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dearmpi.bench.link import ADDRESS_CURE, root_address
from dearmpi.comm.world import World
from dearmpi.errors import ConfigError
from dearmpi.train.ranks.agreement import together

# A rank that fails leaves the others waiting inside gloo for as long as this.
PATIENCE_S = 60.0
_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"


def join_group(world: World, *, patience_s: float = PATIENCE_S) -> None:
    """Initialise ``torch.distributed`` over the ranks of ``world`` (collective).

    Several hosts: rank 0 is found at MASTER_ADDR, else at the address of its host's name; gloo
    uses the interface GLOO_SOCKET_IFNAME, else that of each host's name.
    """
    patience = timedelta(seconds=patience_s)
    one_host = len(set(world.hosts)) == 1
    if one_host:
        os.environ.setdefault(_INTERFACE_VARIABLE, "lo")
    store: TCPStore | None = None
    address = ""
    with together(world, root_only=True):
        if world.is_root:
            address = root_address(one_host)
            store = _open_store(address, world.size, patience)
    place = world.broadcast_text(f"{address} {store.port if store else ''}").split()
    if store is None:
        store = TCPStore(place[0], int(place[1]), world.size, timeout=patience)
    dist.init_process_group(
        "gloo", store=store, rank=world.rank, world_size=world.size, timeout=patience
    )


def _open_store(address: str, size: int, patience: timedelta) -> TCPStore:
    try:
        return TCPStore(address, 0, size, is_master=True, timeout=patience, wait_for_workers=False)
    except (OSError, RuntimeError) as error:
        said = str(error).strip().splitlines()
        raise ConfigError(
            f"rank 0 cannot be reached at {address} ({said[0] if said else 'no reason'}); "
            f"{ADDRESS_CURE}",
            code="address-not-reached",
        ) from error


def leave_group(*others: object, failed: bool) -> None:
    """Take it down, if it is up.

    After a failure operations may be under way whose threads need Python's lock to end, while
    freeing the group would wait for them with the lock held. So the group, and ``others`` that
    refer to it, are then never freed; the other ranks' operations run into the time limit.
    """
    if not dist.is_initialized():
        return
    if failed:
        for kept in (dist.group.WORLD, *others):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    # Its last owner must be the one in Python, which lets go of the lock. A DDP model would wait
    # for the group's threads with the lock held, while one of them may need it to end an operation.
    group = dist.group.WORLD
    dist.destroy_process_group()
    gc.collect()  # models in cycles
    del group
