"""Communication alone: the collectives of a plan, and one plain TCP stream."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Sequence
from functools import partial
from itertools import cycle

import torch

from dearmpi.bench.result import LinkTimes
from dearmpi.comm.algorithms.registry import (
    CollectiveAlgorithms,
    Start,
    run_all,
    select_grid,
    select_reduce_scatter,
)
from dearmpi.comm.world import World
from dearmpi.config import EngineConfig
from dearmpi.device.comm_stream import compute_on_one_core
from dearmpi.errors import ConfigError
from dearmpi.plan.data.layout import Bucket
from dearmpi.train.ranks.agreement import together

_MOST_S = 10.0


def measure_link(
    world: World,
    buckets: Sequence[Bucket],
    config: EngineConfig,
    *,
    repeats: int,
    warm_up_s: float = 0,
) -> list[LinkTimes]:
    """All reduce-scatters, then all all-gathers, as the engine posts them (collective).

    The time is that of the slowest rank. Before the first, one of either kind is not measured.
    repeats: at most; fewer, but one, if they would take more than 10 s, as over a slow link.
    warm_up_s: for how long to send before that in vain, where there are several hosts, since new
    TCP connections carry less at first.
    """
    compute_on_one_core(world)
    reduces, gathers = _starts(world, buckets, config)
    channel = world.open_channel("benchmark", window=config.window)
    for first in (reduces[-1:], gathers[:1]):  # of one buffer: not both in flight
        run_all(world, channel, first)

    def measure() -> LinkTimes:
        own = [run_all(world, channel, reduces), run_all(world, channel, gathers)]
        return LinkTimes(*world.all_reduce(own, "max"))

    begin = time.perf_counter()
    if len(set(world.hosts)) > 1:
        for start in cycle([*reduces, *gathers]):  # one by one: all may take a minute
            if world.all_reduce([time.perf_counter() - begin], "max")[0] >= warm_up_s:
                break
            run_all(world, channel, [start])
    times = [measure()]
    while len(times) < repeats and sum(t.total_s for t in times) + times[-1].total_s <= _MOST_S:
        times.append(measure())
    channel.close()
    return times


def _starts(
    world: World, buckets: Sequence[Bucket], config: EngineConfig
) -> tuple[list[Start], list[Start]]:
    """Reduce-scatters in the order of backprop, and all-gathers in that of feed-forward."""
    buffers = [
        # Filled, since zeros come without memory, which the first to write to would wait for.
        torch.empty(bucket.padded_numel, dtype=getattr(torch, bucket.dtype)).fill_(0)
        for bucket in buckets
    ]
    if config.reduce_scatter == "auto":
        largest = max(buffers, key=lambda b: b.numel())
        algorithm = select_reduce_scatter(world, largest, wire_dtype=config.wire_dtype)
    else:
        algorithm = config.reduce_scatter
    grid, _ = select_grid(world, config, lambda: max(buffers, key=lambda b: b.numel()))
    algorithms = CollectiveAlgorithms(algorithm, config.wire_dtype, grid)
    reduces: list[Start] = [
        partial(algorithms.start_reduce_scatter, buffer) for buffer in reversed(buffers)
    ]
    gathers: list[Start] = [partial(algorithms.start_all_gather, buffer) for buffer in buffers]
    return reduces, gathers


_ADDRESS_VARIABLE = "MASTER_ADDR"
ADDRESS_CURE = "set MASTER_ADDR to an address of rank 0's host that the others can reach"
_LOOPBACK = "127.0.0.1"
_CHUNK = bytes(1 << 18)
_PATIENCE_S = 30.0
_NUM_STRETCHES, _STRETCH_S = 3, 1.0


def root_address(one_host: bool) -> str:
    """The address of rank 0's host for all ranks: MASTER_ADDR, else that of its host's name.

    Raises ConfigError where no other host can reach that.
    """
    named = os.environ.get(_ADDRESS_VARIABLE)
    if named:
        return named
    if one_host:
        return _LOOPBACK
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        raise ConfigError(
            f"{name} does not know its own address ({error}); {ADDRESS_CURE}",
            code="address-not-reached",
        ) from error
    if address.startswith("127."):
        raise ConfigError(
            f"{name} knows itself as {address} only; {ADDRESS_CURE}", code="address-not-reached"
        )
    return address


def measure_wire(world: World) -> float:
    """Bits per second that a rank, of another host if there is one, can send to rank 0
    (collective; at least 2 ranks): the median of some stretches of a second, after a first one
    that is left out, since a new connection carries less at its beginning.

    Raises AgreedError where rank 0 cannot be reached.
    """
    server: socket.socket | None = None
    place = ""
    with together(world, root_only=True):
        if world.is_root:
            server = _listen(root_address(len(set(world.hosts)) == 1))
            place = " ".join(map(str, server.getsockname()[:2]))
    host, port = world.broadcast_text(place).split()
    others = [rank for rank, name in enumerate(world.hosts) if name != world.hosts[0]]
    rate = 0.0
    with together(world):
        try:
            if server is not None:
                with server:
                    rate = _receive(server)
            elif world.rank == (others or [1])[0]:
                _send((host, int(port)), (1 + _NUM_STRETCHES) * _STRETCH_S)
        except OSError as error:
            raise ConfigError(
                f"a plain TCP stream to rank 0 at {host}, port {port}: {error}; {ADDRESS_CURE}",
                code="address-not-reached",
            ) from error
    return world.all_reduce([rate], "max")[0]


def _listen(address: str) -> socket.socket:
    try:
        server = socket.create_server((address, 0))
    except OSError as error:
        raise ConfigError(
            f"rank 0 cannot listen at {address} ({error}); {ADDRESS_CURE}",
            code="address-not-reached",
        ) from error
    server.settimeout(_PATIENCE_S)
    return server


def _receive(server: socket.socket) -> float:
    connection, _ = server.accept()
    rates = []
    with connection:
        connection.settimeout(_PATIENCE_S)
        start, total = time.perf_counter(), 0
        while data := connection.recv(4 * len(_CHUNK)):
            total += len(data)
            took = time.perf_counter() - start
            if took >= _STRETCH_S:
                rates.append(8 * total / took)
                start, total = start + took, 0
    if len(rates) < 2:
        raise ConfigError(
            f"the stream to rank 0 ended after {len(rates)} stretches of {_STRETCH_S} s",
            code="address-not-reached",
        )
    return statistics.median(rates[1:])


def _send(place: tuple[str, int], seconds: float) -> None:
    with socket.create_connection(place, timeout=_PATIENCE_S) as connection:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            connection.sendall(_CHUNK)
