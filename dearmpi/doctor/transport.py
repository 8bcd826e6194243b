"""Transport: what carries messages between hosts, and how TCP shares the network."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from dearmpi.comm.world import World
from dearmpi.doctor.finding import Finding, ok, warn

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
    none where there are no such connections, or where that cannot be asked.
    """
    names = os.listdir(_OWN_FILES) if _OWN_FILES.is_dir() else []
    return tuple(sorted({_algorithm(int(name)) for name in names} - {""}))


def _algorithm(descriptor: int) -> str:
    """Of one connection; empty for what is none."""
    with suppress(OSError):  # not connected, or closed meanwhile
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            with socket.socket(fileno=os.dup(descriptor)) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and _leaves(one):
                    told = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES)
                    return told.rstrip(b"\0").decode("ascii", "replace")
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
