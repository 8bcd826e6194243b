"""The wire's own rate: one TCP stream between two ranks, with no library in between."""

from __future__ import annotations

import os
import socket
import statistics
import time

from dearmpi.comm.world import World
from dearmpi.errors import ConfigError
from dearmpi.train.ranks.agreement import together

_ADDRESS_VARIABLE = "MASTER_ADDR"
ADDRESS_CURE = "set MASTER_ADDR to an address of rank 0's host that the others can reach"
_LOOPBACK = "127.0.0.1"
_CHUNK = bytes(1 << 18)
_PATIENCE_S = 30.0
_NUM_STRETCHES = 3


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
            f"{name} does not know its own address ({error}); {ADDRESS_CURE}"
        ) from error
    if address.startswith("127."):
        raise ConfigError(f"{name} knows itself as {address} only; {ADDRESS_CURE}")
    return address


def measure_wire(world: World, *, seconds: float = 1.0) -> float:
    """Bits per second that a rank, of another host if there is one, can send to rank 0
    (collective; at least 2 ranks): the median of some stretches of ``seconds``, after a first one
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
                    rate = _receive(server, seconds)
            elif world.rank == (others or [1])[0]:
                _send((host, int(port)), (1 + _NUM_STRETCHES) * seconds)
        except OSError as error:
            raise ConfigError(
                f"a plain TCP stream to rank 0 at {host}, port {port}: {error}; {ADDRESS_CURE}"
            ) from error
    return world.all_reduce([rate], "max")[0]


def _listen(address: str) -> socket.socket:
    try:
        server = socket.create_server((address, 0))
    except OSError as error:
        raise ConfigError(f"rank 0 cannot listen at {address} ({error}); {ADDRESS_CURE}") from error
    server.settimeout(_PATIENCE_S)
    return server


def _receive(server: socket.socket, seconds: float) -> float:
    peer, _ = server.accept()
    rates = []
    with peer:
        peer.settimeout(_PATIENCE_S)
        start, total = time.perf_counter(), 0
        while data := peer.recv(4 * len(_CHUNK)):
            total += len(data)
            took = time.perf_counter() - start
            if took >= seconds:
                rates.append(8 * total / took)
                start, total = start + took, 0
    if len(rates) < 2:
        raise ConfigError(f"the stream to rank 0 ended after {len(rates)} stretches of {seconds} s")
    return statistics.median(rates[1:])


def _send(place: tuple[str, int], seconds: float) -> None:
    with socket.create_connection(place, timeout=_PATIENCE_S) as peer:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            peer.sendall(_CHUNK)
