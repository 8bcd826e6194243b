"""Launch: which MPI library there is, and whether the ranks that were started found each other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dearmpi.comm.backends.alone import AloneCollectives
from dearmpi.comm.lifecycle import connect
from dearmpi.comm.process import Library, announced_size, is_from_torchrun
from dearmpi.comm.watchdog.watchdog import StallLimits
from dearmpi.comm.world import World
from dearmpi.doctor.finding import Finding, fail, ok, warn
from dearmpi.errors import LaunchError

_INSTALL = (
    "pip install 'dearmpi[mpich]' brings one that needs no compiler; or load your site's MPI module"
)
_MOST_HOSTS = 8  # named one by one
# The limits of a wait for other ranks: a doctor's patients may be unable to reach each other.
_STALL_S = (15.0, 60.0)
# Where rank 0 first tries what MPI does on a device: each of four operations may hang.
_PROBING_STALL_S = (60.0, 600.0)


_VERSION_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Mpirun:
    """The ``mpirun`` that a shell would start.

    path: empty where the PATH has none. mpi: ``MPICH`` or ``Open MPI``, whose it is; empty for
    others. own: the one beside this Python; empty where there is none. has_srun: SLURM's is there.
    """

    path: str = ""
    mpi: str = ""
    own: str = ""
    has_srun: bool = False


def find_mpirun() -> Mpirun:
    """Look on the PATH, and have what is there print its version; call it before MPI starts."""
    path = shutil.which("mpirun") or ""
    beside = Path(sys.executable).with_name("mpirun")
    mpi = ""
    if path:
        try:
            said = subprocess.run(
                [path, "--version"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_VERSION_LIMIT_S,
            ).stdout
        except (OSError, subprocess.TimeoutExpired):
            said = ""
        mpi = "MPICH" if "HYDRA" in said else "Open MPI" if "Open MPI" in said else ""
    own = str(beside) if beside.exists() else ""
    return Mpirun(path, mpi, own, has_srun=shutil.which("srun") is not None)


def open_world(*, probing: bool) -> tuple[World, bool]:
    """The world that this process was launched into, and True; else a world of one, and False.

    probing: whether rank 0 may try its device before.
    """
    limits = StallLimits(*(_PROBING_STALL_S if probing else _STALL_S))
    try:
        return connect(stall_limits=limits), True
    except LaunchError:
        return World(AloneCollectives(), progress="poll"), False


def find_library() -> tuple[Library | None, str]:
    """The MPI library, or why there is none."""
    try:
        from dearmpi.comm.backends.mpi import library

        return library(), ""
    except (ImportError, RuntimeError) as error:
        return None, str(error).strip() or type(error).__name__


def judge_library(library: Library | None, reason: str) -> Finding:
    """Whether there is an MPI library."""
    if library is None:
        return fail("mpi", f"no MPI library can be loaded: {reason}", cure=_INSTALL)
    device = f" ({library.device})" if library.device else ""
    return ok(
        "mpi",
        f"{library.name} {library.version}{device}, mpi4py {library.mpi4py}, ABI: {library.abi}",
    )


def judge_thread_level(library: Library) -> Finding:
    """Whether a thread of its own may drive communication."""
    if library.thread_level == "MPI_THREAD_MULTIPLE":
        return ok("thread", f"{library.thread_level}: a thread of its own drives communication")
    is_serialized = library.thread_level == "MPI_THREAD_SERIALIZED"
    refused = "" if is_serialized else "; several ranks cannot train on CUDA tensors"
    return warn(
        "thread",
        f"{library.thread_level}: the threads that compute must drive communication between "
        f"layers, so less of it hides{refused}",
        cure="use an MPI built with MPI_THREAD_MULTIPLE, and leave MPI4PY_RC_THREADS and "
        "MPI4PY_RC_THREAD_LEVEL unset",
    )


def name_launcher(environment: Mapping[str, str]) -> str:
    """What started this process, by the variables it leaves."""
    if is_from_torchrun(environment):
        is_torchrun = "TORCHELASTIC_RUN_ID" in environment
        return "torchrun" if is_torchrun else "what set RANK and WORLD_SIZE"
    if "HYDI_CONTROL_FD" in environment:
        return "mpirun (Hydra)"
    if "PRTE_LAUNCHED" in environment or "OMPI_COMM_WORLD_SIZE" in environment:
        return "mpirun (Open MPI)"
    if "SLURM_STEP_ID" in environment and "SLURM_STEP_NUM_TASKS" in environment:
        return "srun"
    if "PMI_SIZE" in environment:
        return "a launcher that speaks PMI"
    return ""


def judge_launch(
    hosts: Sequence[str],
    library: Library | None,
    *,
    joined: bool,
    environment: Mapping[str, str] = os.environ,
    mpirun: Mpirun | None = None,
) -> Finding:
    """Whether the ranks that were launched are one world; ``hosts``: each rank's.

    mpirun: what would start several, for one rank without a launcher; None: not looked for.
    """
    launcher = name_launcher(environment)
    if not joined:
        said = f"{announced_size(environment)} processes were launched by {launcher}, but "
        if library is None:
            return fail("launch", f"{said}have no MPI to find each other by", cure=_INSTALL)
        return fail(
            "launch",
            f"{said}each is a world of its own: {launcher} and {library.name} do not speak the "
            "same language [launcher-mismatch]",
            cure=_match_launcher(library),
        )
    counts = Counter(hosts)
    ranks = f"{len(hosts)} rank{'' if len(hosts) == 1 else 's'}"
    if not launcher and len(hosts) == 1:
        alone = f"{ranks} on {hosts[0]}, no launcher"
        if mpirun is not None and (finding := _judge_mpirun(alone, library, mpirun)) is not None:
            return finding
        return ok("launch", f"{alone} (several: mpirun -n 2 dear-train doctor)")
    started = f"started by {launcher or 'an unknown launcher'}"
    if len(counts) == 1:
        return ok("launch", f"{ranks} on {hosts[0]}, {started}")
    listed = [f"{host}: {number}" for host, number in counts.items()]
    more = f" and {len(listed) - _MOST_HOSTS} more" if len(listed) > _MOST_HOSTS else ""
    said = f"{ranks} on {len(counts)} hosts ({', '.join(listed[:_MOST_HOSTS])}{more}), {started}"
    return ok("launch", said)


def _judge_mpirun(alone: str, library: Library | None, mpirun: Mpirun) -> Finding | None:
    """The warning of an ``mpirun`` that cannot start several ranks; None where it may."""
    use_own = f"activate the environment, or call {mpirun.own}"
    if not mpirun.path:
        if mpirun.has_srun and not mpirun.own:
            return None
        cure = use_own if mpirun.own else _INSTALL
        return warn("launch", f"{alone}; the PATH has no mpirun to start several with", cure=cure)
    if library is None or {library.name, mpirun.mpi} != {"MPICH", "Open MPI"}:
        return None
    return warn(
        "launch",
        f"{alone}; {mpirun.path} belongs to {mpirun.mpi}, but the library is {library.name}",
        cure=use_own if mpirun.own not in ("", mpirun.path) else _match_launcher(library),
    )


def _match_launcher(library: Library) -> str:
    flag = {"MPICH": "srun --mpi=pmi2", "Open MPI": "srun --mpi=pmix"}.get(library.name)
    return f"use the mpirun that belongs to {library.name}" + (f", or {flag}" if flag else "")
