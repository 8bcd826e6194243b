"""``torch.multiprocessing.spawn`` in a script: its processes are there already, as ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import distributed

import dearmpi
from dearmpi import World
from dearmpi.drop_in.arguments import note
from dearmpi.errors import ConfigError

_torchs_spawn: Callable[..., Any] = getattr(torch.multiprocessing, "spawn")  # noqa: B009
_PLACE = ("MASTER_ADDR", "MASTER_PORT")


def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> Any:
    """Call ``fn(local rank, *args)`` in this process (collective).

    args, MASTER_ADDR, MASTER_PORT: those of the host's first rank, as one process would have chosen
    them. Where ``torch.distributed`` has begun, torch starts ``nprocs`` workers instead.

    Raises ConfigError on all ranks unless every host has ``nprocs`` of them, and without ``join``.
    """
    if distributed.is_initialized():
        return _torchs_spawn(fn, args, nprocs, join, daemon, start_method)
    world = dearmpi.connect()
    _check(world, nprocs, join=join)
    first = world.hosts.index(world.host)
    for name, value in zip(_PLACE, world.all_gather_object(_place())[first], strict=True):
        if value is not None:
            os.environ[name] = value
    with suppress(ConfigError):  # some cannot travel, such as a queue
        args = world.all_gather_object(args)[first]
    note(world, "torch.multiprocessing.spawn starts no process: each rank calls the function")
    fn(world.local_rank, *args)
    return None


def _check(world: World, nprocs: int, *, join: bool) -> None:
    numbers = world.all_gather_object((nprocs, join))
    for host, (wanted, waits) in zip(world.hosts, numbers, strict=True):
        if (there := world.hosts.count(host)) != wanted:
            raise ConfigError(
                f"the script spawns {wanted} processes on {host}, where the job has {there} "
                f"ranks; start {wanted} on each host, as by mpirun -n {wanted} on one",
                code="ddp-not-served",
            )
        if not waits:
            raise ConfigError(
                "the script spawns processes with join=False, but each rank calls the function "
                "itself; leave out join=False",
                code="ddp-not-served",
            )


def _place() -> list[str | None]:
    return [os.environ.get(name) for name in _PLACE]
