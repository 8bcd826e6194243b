"""The start of serving: torch's names become dearmpi's, and the ranks get torchrun's variables."""

from __future__ import annotations

import os
import socket

import torch

import dearmpi
from dearmpi import World
from dearmpi.drop_in.replacement import replace_in_torch
from dearmpi.drop_in.serving import Choices, Chosen
from dearmpi.errors import ConfigError

_LOOPBACK = "127.0.0.1"
_CURE = "set MASTER_ADDR to an address of rank 0's host that all hosts reach"


def serve_scripts(choices: Choices) -> World:
    """Connect, set the variables of the ranks and replace torch's names (collective).

    choices: for every model that is wrapped from now on.
    """
    Chosen.choices = choices
    world = dearmpi.connect()
    announce_ranks(world)
    replace_in_torch()
    return world


def announce_ranks(world: World) -> None:
    """Set RANK, WORLD_SIZE and their like, for the script's own torch.distributed (collective).

    Frameworks prefer TORCHELASTIC_RUN_ID to the variables of MPI and SLURM. Without an accelerator,
    ACCELERATE_USE_CPU has accelerate see the ranks as well.

    MASTER_ADDR and MASTER_PORT are rank 0's, if it has them; else its address and a free port.
    Raises ConfigError where no other host can reach rank 0's.
    """
    hosts = list(dict.fromkeys(world.hosts))
    on_one_host = len(hosts) == 1
    place = world.broadcast_object(_choose_place(on_one_host) if world.is_root else None)
    if isinstance(place, str):
        raise ConfigError(place, code="address-not-reached")
    address, port = place
    os.environ.update(
        RANK=str(world.rank),
        WORLD_SIZE=str(world.size),
        LOCAL_RANK=str(world.local_rank),
        LOCAL_WORLD_SIZE=str(world.hosts.count(world.host)),
        GROUP_RANK=str(hosts.index(world.host)),
        GROUP_WORLD_SIZE=str(len(hosts)),
        TORCHELASTIC_RUN_ID="dearmpi",
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
    )
    if not torch.accelerator.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    if on_one_host:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _choose_place(on_one_host: bool) -> tuple[str, int] | str:
    """Address and port, or why there is none."""
    address = os.environ.get("MASTER_ADDR") or (_LOOPBACK if on_one_host else "")
    if not address:
        name = socket.gethostname()
        try:
            address = socket.gethostbyname(name)
        except OSError as error:
            return f"{name} does not know its own address ({error}); {_CURE}"
        if address.startswith("127."):
            return f"{name} knows itself as {address} only; {_CURE}"
    named = os.environ.get("MASTER_PORT", "")
    return address, int(named) if named.isdigit() else _free_port()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])
