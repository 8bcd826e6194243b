"""What checks start from and end in: facts, which each rank knows of itself and rank 0 judges, and
findings, as they read.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch

import dearmpi
from dearmpi.comm.world import World
from dearmpi.errors import CommError, ConfigError, LaunchError, MismatchError
from dearmpi.train.ranks.device import VisibleGpus, look_for_gpus
from dearmpi.train.ranks.threads import choose_threads

Status = Literal["ok", "warn", "fail"]

_NAME_WIDTH = 11
_INDENT = " " * (len("[warn] ") + _NAME_WIDTH + 1)
# A failure ends the command with the code that `dear-train run` would end with in its place.
_EXIT_CODES = {
    "mpi": LaunchError.exit_code,
    "launch": LaunchError.exit_code,
    "software": MismatchError.exit_code,
    "network": CommError.exit_code,
    "run folder": ConfigError.exit_code,
}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of the check called ``name``.

    said: what is so, with its figures. cure: what to do about it; empty where all is well.
    """

    status: Status
    name: str
    said: str
    cure: str = ""

    def __post_init__(self) -> None:
        assert bool(self.cure) == (self.status != "ok"), (
            f"{self.name}: {self.status}, {self.cure!r}"
        )


def ok(name: str, said: str) -> Finding:
    """All is well."""
    return Finding("ok", name, said)


def warn(name: str, said: str, *, cure: str) -> Finding:
    """It works, but not as well as it could."""
    return Finding("warn", name, said, cure)


def fail(name: str, said: str, *, cure: str) -> Finding:
    """Training cannot work like this."""
    return Finding("fail", name, said, cure)


def describe(finding: Finding) -> list[str]:
    """Lines: status, name and what was found; below it the cure."""
    mark = f"[{finding.status}]".ljust(len("[warn] "))
    first, *more = finding.said.splitlines()
    lines = [f"{mark}{finding.name.ljust(_NAME_WIDTH)} {first}"]
    lines += [_INDENT + line for line in more]
    if finding.cure:
        first, *more = finding.cure.splitlines()
        lines += [f"{_INDENT}-> {first}", *(f"{_INDENT}   {line}" for line in more)]
    return lines


def summarize(findings: Sequence[Finding]) -> str:
    """One line that counts what is wrong."""
    counts = [
        f"{number} {noun}{'' if number == 1 else 's'}"
        for status, noun in (("fail", "failure"), ("warn", "warning"))
        if (number := sum(finding.status == status for finding in findings))
    ]
    return ", ".join(counts) or "all is well"


def exit_code(findings: Sequence[Finding]) -> int:
    """0 unless something failed; then the first failure's."""
    failed = [finding.name for finding in findings if finding.status == "fail"]
    return _EXIT_CODES.get(failed[0], 1) if failed else 0


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
