"""Transport: what carries messages between hosts, as far as it was chosen by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
