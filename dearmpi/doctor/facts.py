"""Facts: what each rank knows of itself, gathered so that rank 0 can judge all of them."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import torch

import dearmpi
from dearmpi.comm.world import World
from dearmpi.train.ranks.device import VisibleGpus, look_for_gpus
from dearmpi.train.ranks.threads import choose_threads

PACKAGES = ("torch", "numpy", "mpi4py", "safetensors", "PyYAML")
MISSING = "missing"  # in place of a version
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_INFINIBAND = Path("/sys/class/infiniband")
# Variables that choose how MPI and the processes behave; others may hold secrets.
_PREFIXES = (
    "FI_", "UCX_", "MPICH_", "MPIR_", "OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_", "HYDRA_", "I_MPI_",
    "OMP_", "MKL_NUM", "CUDA_VISIBLE", "RDMAV_", "IBV_", "SLURM_MPI", "SLURM_STEP", "SLURM_CPU",
    "MPI4PY_", "DEAR_",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One rank.

    system: the kernel and the C library.
    cores: those it may run on. quota: cores' worth of time that its container may use; None for no
    limit. threads: torch's, as ``dear-train run`` would choose them, and why. threads_asked:
    whether the environment or a file asks for them. script_threads: those that a script begins
    with by itself.
    devices: names of the CUDA devices that it can use; gpus: where there are none, why.
    infiniband: names of its host's adapters.
    """

    rank: int
    host: str
    system: str
    cores: tuple[int, ...]
    quota: float | None
    threads: int
    threads_reason: str
    threads_asked: bool
    script_threads: int
    versions: Mapping[str, str]
    devices: tuple[str, ...]
    gpus: VisibleGpus
    infiniband: tuple[str, ...]
    start_method: str
    environment: Mapping[str, str]


def gather_facts(world: World, *, threads_asked: int | None) -> list[RankFacts]:
    """Every rank's facts, by rank (collective). threads_asked: as for ``dear-train run``."""
    script_threads = torch.get_num_threads()  # before they are chosen
    threads = choose_threads(
        world, requested=threads_asked, progress_thread=world.has_progress_thread
    )
    own = RankFacts(
        rank=world.rank,
        host=world.host,
        system=platform.platform(),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        quota=read_quota(_QUOTA),
        threads=threads.count,
        threads_reason=threads.reason,
        threads_asked=threads_asked is not None,
        script_threads=script_threads,
        versions=own_versions(),
        devices=cuda_devices(),
        gpus=look_for_gpus(),
        infiniband=tuple(sorted(os.listdir(_INFINIBAND))) if _INFINIBAND.is_dir() else (),
        # The first is the default; asking for the one in use would settle it.
        start_method=multiprocessing.get_all_start_methods()[0],
        environment=relevant(os.environ),
    )
    texts = world.all_gather_text(json.dumps(asdict(own)))
    return [_read(text) for text in texts]


def read_quota(path: Path) -> float | None:
    """Cores' worth of time from a control group's ``cpu.max``; None where there is no limit."""
    try:
        quota, period = path.read_text().split()
        return float(quota) / float(period)
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or "max"
        return None


def own_versions() -> dict[str, str]:
    """Python's version and those of what training needs."""
    versions = {"python": platform.python_version(), "dearmpi": dearmpi.__version__}
    return versions | {name: installed_version(name) or MISSING for name in PACKAGES}


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, without importing it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def cuda_devices() -> tuple[str, ...]:
    """The names of the CUDA devices that this process can use."""
    num_usable = look_for_gpus().num_usable
    return tuple(torch.cuda.get_device_name(index) for index in range(num_usable))


def relevant(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that may explain a finding."""
    names = sorted(name for name in environment if name.startswith(_PREFIXES))
    return {name: environment[name] for name in names}


def _read(text: str) -> RankFacts:
    plain = json.loads(text)
    for name in ("cores", "devices", "infiniband"):
        plain[name] = tuple(plain[name])
    plain["gpus"] = VisibleGpus(**plain["gpus"])
    return RankFacts(**plain)
