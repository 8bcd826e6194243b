"""The wire's own rate: one TCP stream between two ranks, with no library in between."""

from __future__ import annotations

import os
import socket
import time

from dearmpi.comm.world import World

_ADDRESS_VARIABLE = "MASTER_ADDR"
_LOOPBACK = "127.0.0.1"
_CHUNK = bytes(1 << 18)
_PATIENCE_S = 30.0


def root_address(one_host: bool) -> str:
    """The address of rank 0's host for all ranks: MASTER_ADDR, else that of its host's name."""
    named = os.environ.get(_ADDRESS_VARIABLE)
    if named:
        return named
    return _LOOPBACK if one_host else socket.gethostbyname(socket.gethostname())


def measure_wire(world: World, *, seconds: float = 1.0) -> float:
    """Bits per second that rank 1 can send to rank 0 (collective; at least 2 ranks)."""
    server: socket.socket | None = None
    place = ""
    if world.is_root:
        server = socket.create_server((root_address(len(set(world.hosts)) == 1), 0))
        server.settimeout(_PATIENCE_S)
        place = " ".join(map(str, server.getsockname()[:2]))
    host, port = world.broadcast_text(place).split()
    rate = 0.0
    if server is not None:
        with server:
            rate = _receive(server)
    elif world.rank == 1:
        _send((host, int(port)), seconds)
    return world.all_reduce([rate], "max")[0]


def _receive(server: socket.socket) -> float:
    peer, _ = server.accept()
    with peer:
        peer.recv(len(_CHUNK))
        start = last = time.perf_counter()
        total = 0
        while data := peer.recv(4 * len(_CHUNK)):
            total += len(data)
            last = time.perf_counter()
    return 8 * total / max(last - start, 1e-9)


def _send(place: tuple[str, int], seconds: float) -> None:
    with socket.create_connection(place, timeout=_PATIENCE_S) as peer:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            peer.sendall(_CHUNK)
