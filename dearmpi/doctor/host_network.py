"""MeasuredNetwork: how fast hosts exchange messages through MPI, and how much of it hides.

The hosts form a ring, as in the reduce-scatters of training: each sends to the next while it
receives from the one before, all at once. What a host receives tells of the link to it alone, so a
slow one can be named. Nothing but MPI is used, and nothing listens on a port. On one host the ranks
form the ring.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from dearmpi.bench.collective_times import Overlap, measure_overlap
from dearmpi.comm.algorithms.registry import CollectiveAlgorithms, run_all
from dearmpi.comm.api.collectives import Collectives, PointToPoint, Request
from dearmpi.comm.progress.channel import Channel
from dearmpi.comm.world import World
from dearmpi.config import MIB
from dearmpi.doctor.finding import Finding, ok, warn

_TAG = 1
_NUM_SMALL = 20  # messages of a byte, one after the other
_NUM_LARGE = 3
_FIRST_BYTES = MIB // 16
_MOST_BYTES = 16 * MIB
_LARGE_S = 0.15  # what a large message is to take
_ALIKE, _SLOW_SHARE = 0.9, 0.5  # of the fastest link's rate
_OVERLAP_S = 0.03
_OVERLAP_BYTES = (MIB // 4, 8 * MIB)
_LITTLE_OVERLAP = 0.6


@dataclass(frozen=True, slots=True)
class Link:
    """What ``receiver`` got from ``sender``, in bits per second. Both are hosts, or ranks."""

    sender: str
    receiver: str
    bits_s: float


@dataclass(frozen=True, slots=True)
class MeasuredNetwork:
    """The ring's links. latency_s: of a byte, through the thread that drives communication."""

    between_hosts: bool
    latency_s: float
    links: tuple[Link, ...]


class Exchange(Request):
    """A message to the next member of the ring while one comes from the member before."""

    def __init__(self, nbytes: int, *, source: int, destination: int) -> None:
        self._outgoing, self._incoming = (torch.zeros(nbytes, dtype=torch.uint8) for _ in "oi")
        self._source, self._destination = source, destination
        self.received_at = 0.0  # by time.perf_counter

    def start(self, collectives: Collectives) -> Request:
        """Post both; the request is this object."""
        assert isinstance(collectives, PointToPoint), f"{collectives} has no point-to-point"
        self._receive = collectives.start_receive(self._incoming, self._source, _TAG)
        self._send = collectives.start_send(self._outgoing, self._destination, _TAG)
        return self

    def test(self) -> bool:
        if not self.received_at and self._receive.test():
            self.received_at = time.perf_counter()
        return bool(self._send.test() and self.received_at)


def measure_network(world: World, channel: Channel) -> MeasuredNetwork:
    """Measure every link of the ring in about a second (collective; at least 2 ranks)."""
    hosts = list(dict.fromkeys(world.hosts))
    between_hosts = len(hosts) > 1
    members = [world.hosts.index(host) for host in hosts]
    if not between_hosts:
        hosts, members = [f"rank {rank}" for rank in range(world.size)], list(range(world.size))
    place = members.index(world.rank) if world.rank in members else None
    ends = None if place is None else (members[place - 1], members[(place + 1) % len(members)])
    latency_s = _measure_latency(world, channel, ends)
    first_s = world.all_reduce([_receive_s(world, channel, ends, _FIRST_BYTES)], "max")[0]
    nbytes = int(min(_MOST_BYTES, max(1.0, _LARGE_S / max(first_s, 1e-6)) * _FIRST_BYTES))
    seconds = [_receive_s(world, channel, ends, nbytes) for _ in range(_NUM_LARGE)]
    own = None if place is None else [place, 8 * nbytes / max(1e-9, statistics.median(seconds))]
    rates = [json.loads(text) for text in world.all_gather_text(json.dumps(own))]
    links = tuple(Link(hosts[at - 1], hosts[at], rate) for at, rate in (t for t in rates if t))
    return MeasuredNetwork(between_hosts, latency_s, links)


def _measure_latency(world: World, channel: Channel, ends: tuple[int, int] | None) -> float:
    """Seconds of a byte: each is sent when the one before has come, on the slowest rank."""
    starts = [] if ends is None else [_exchange(1, ends).start for _ in range(_NUM_SMALL)]
    own = [run_all(world, channel, starts) / _NUM_SMALL for _ in range(3)]
    return min(world.all_reduce(own, "max"))


def _receive_s(world: World, channel: Channel, ends: tuple[int, int] | None, nbytes: int) -> float:
    """Seconds until this rank's message has come; 0 where it is not in the ring."""
    if ends is None:
        world.barrier()
        return 0.0
    exchange = _exchange(nbytes, ends)
    world.barrier()
    begin = time.perf_counter()
    channel.run("message", exchange.start)
    return exchange.received_at - begin


def _exchange(nbytes: int, ends: tuple[int, int]) -> Exchange:
    return Exchange(nbytes, source=ends[0], destination=ends[1])


def judge_network(network: MeasuredNetwork) -> Finding:
    """Whether some link is much slower than another."""
    links = sorted(network.links, key=lambda link: link.bits_s)
    slowest, low, high = links[0], links[0].bits_s, links[-1].bits_s
    where = f"between {len(links)} hosts" if network.between_hosts else "within one host"
    rates = describe_rate(high)
    if low < _ALIKE * high:
        rates = f"{describe_rate(low)} to {rates}"
    said = (
        f"{where}, each sending and receiving: {rates} each way, "
        f"{network.latency_s * 1e6:.0f} us for a byte"
    )
    if network.between_hosts and low < _SLOW_SHARE * high:
        return warn(
            "network",
            f"{said}\nslowest: from {slowest.sender} to {slowest.receiver}",
            cure=f"every collective waits for the slowest link: look at those of {slowest.sender} "
            f"and {slowest.receiver}, or leave the slow host out",
        )
    return ok("network", said)


def measure_hiding(world: World, channel: Channel, network: MeasuredNetwork) -> tuple[int, Overlap]:
    """A ring reduce-scatter beside computation that needs no core (collective).

    Returns the bytes of its buffer, chosen so that it takes a few hundredths of a second. Its times
    are as ``dear-train bench --collectives`` defines them.
    """
    least, most = _OVERLAP_BYTES
    rate = min(link.bits_s for link in network.links)
    nbytes = int(min(most, max(least, rate / 8 * _OVERLAP_S)))
    count = max(1, nbytes // 4 // world.size) * world.size
    start = partial(CollectiveAlgorithms("ring").start_reduce_scatter, torch.zeros(count))
    return 4 * count, measure_overlap(world, channel, start, repeats=3)


def judge_overlap(nbytes: int, overlap: Overlap) -> Finding:
    """Whether a reduce-scatter runs on while the rank computes."""
    said = (
        f"{overlap.osu:.0%} of a reduce-scatter of {nbytes / 1e6:.1f} MB "
        f"({overlap.pure_s * 1e3:.1f} ms) hides behind computation of that length"
    )
    if overlap.osu >= _LITTLE_OVERLAP:
        return ok("overlap", said)
    return warn(
        "overlap",
        said,
        cure="the thread that drives communication gets too little time: see cores and thread "
        "above, start fewer ranks per host, and measure again on a quiet machine",
    )


def describe_rate(bits_s: float) -> str:
    """Bits per second as networks are sold."""
    return f"{bits_s / 1e9:.1f} Gbit/s" if bits_s >= 1e9 else f"{bits_s / 1e6:.0f} Mbit/s"


_CHOICES = (
    "MPIR_CVAR_CH4_NETMOD", "FI_PROVIDER", "FI_TCP_IFACE", "UCX_TLS", "UCX_NET_DEVICES",
    "OMPI_MCA_pml", "OMPI_MCA_btl", "OMPI_MCA_mtl", "OMPI_MCA_btl_tcp_if_include",
)  # fmt: skip
_NATIVE_TLS = ("rc", "ud", "dc", "ib", "all")  # of UCX, over InfiniBand


def judge_transport(
    environment: Mapping[str, str], infiniband: Sequence[str], *, crowded: bool
) -> Finding:
    """infiniband: the adapters of rank 0's host. crowded: some host has more ranks than cores."""
    chosen = {name: environment[name] for name in _CHOICES if environment.get(name)}
    said = " ".join(f"{name}={value}" for name, value in chosen.items())
    if environment.get("MPIR_CVAR_ASYNC_PROGRESS", "0") not in ("", "0"):
        return warn(
            "transport",
            "MPIR_CVAR_ASYNC_PROGRESS makes a thread spin in each rank, beside the one that "
            "drives communication here",
            cure="unset MPIR_CVAR_ASYNC_PROGRESS",
        )
    if infiniband and _avoids_infiniband(chosen):
        return warn(
            "transport",
            f"{', '.join(infiniband)} is there, but {said} asks for TCP",
            cure=f"unset {' '.join(chosen)}, so that the library takes the fastest there is",
        )
    if crowded and _spins(environment):
        return warn(
            "transport",
            "there are more ranks than cores, and Open MPI's ranks spin while they wait",
            cure="export OMPI_MCA_mpi_yield_when_idle=1",
        )
    return ok("transport", said or "the library's own choice (nothing is set)")


def _avoids_infiniband(chosen: Mapping[str, str]) -> bool:
    if chosen.get("FI_PROVIDER", "").startswith(("tcp", "sockets")):
        return True
    tls = chosen.get("UCX_TLS", "").split(",")
    return "tcp" in tls and not any(name.startswith(_NATIVE_TLS) for name in tls)


def _spins(environment: Mapping[str, str]) -> bool:
    is_open_mpi = "OMPI_COMM_WORLD_SIZE" in environment
    return is_open_mpi and environment.get("OMPI_MCA_mpi_yield_when_idle", "0") in ("", "0")


_OWN_FILES = Path("/proc/self/fd")
_PAUSING = "bbr"
_NAME_BYTES = 16  # of an algorithm at most, as Linux has it


def algorithms_in_use() -> tuple[str, ...]:
    """The congestion control of this process's connections to other addresses, as Linux names it;
    none where there are no such connections, or where the system does not report it.
    """
    names = os.listdir(_OWN_FILES) if _OWN_FILES.is_dir() else []
    return tuple(sorted({_algorithm(int(name)) for name in names} - {""}))


def _algorithm(descriptor: int) -> str:
    """Of one connection; empty for what is none."""
    with suppress(OSError):  # not connected, or closed meanwhile
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            with socket.socket(fileno=os.dup(descriptor)) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and _leaves(one):
                    name = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES)
                    return name.rstrip(b"\0").decode("ascii", "replace")
    return ""


def _leaves(one: socket.socket) -> bool:
    return bool(one.getpeername()[0] != one.getsockname()[0])


def gather_algorithms(world: World) -> dict[str, str]:
    """By host what its ranks' connections use, as far as they have any (collective)."""
    texts = world.all_gather_text(" ".join(algorithms_in_use()))
    found: dict[str, set[str]] = {}
    for host, text in zip(world.hosts, texts, strict=True):
        found.setdefault(host, set()).update(text.split())
    return {host: " ".join(sorted(names)) for host, names in found.items() if names}


def judge_tcp(algorithms: Mapping[str, str]) -> Finding | None:
    """Whether connections pause by themselves; None where MPI has none over TCP."""
    if not algorithms:
        return None
    pausing = [host for host, names in algorithms.items() if _PAUSING in names.split()]
    if not pausing:
        return ok("tcp", f"between hosts: {', '.join(sorted(set(algorithms.values())))}")
    shown = ", ".join(pausing[:4]) + (f" and {len(pausing) - 4} more" if len(pausing) > 4 else "")
    return warn(
        "tcp",
        f"{_PAUSING} on {shown}: every ten seconds or so a connection sends next to nothing for "
        "0.2 s, and whatever waits for it waits as long",
        cure="sysctl net.ipv4.tcp_congestion_control=cubic on these hosts, or for the network of "
        "the job alone: ip route change NETWORK dev DEVICE congctl cubic",
    )
