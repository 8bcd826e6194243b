"""Software: the same on every rank, what is optional, and how worker processes are started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dearmpi.doctor.facts import MISSING, RankFacts, installed_version
from dearmpi.doctor.finding import Finding, fail, ok, warn

# Distributions that only some tasks and options need, with the extra that brings each.
EXTRAS = {
    "scikit-learn": "digits",
    "Pillow": "images",
    "transformers": "transformers",
    "torchvision": "torchvision",
    "timm": "timm",
    "tensorboard": "tensorboard",
}
_FORK_SAFE = ("RDMAV_FORK_SAFE", "IBV_FORK_SAFE")


def judge_software(ranks: Sequence[RankFacts]) -> Finding:
    """Whether every rank has what training needs, and in the same versions."""
    first = ranks[0]
    for rank in ranks:
        # Of mpi4py another check tells more, and a rank alone can do without.
        absent = [n for n, version in rank.versions.items() if version == MISSING and n != "mpi4py"]
        if absent:
            return fail(
                "packages",
                f"{', '.join(absent)} is missing on rank {rank.rank} ({rank.host})",
                cure=f"pip install {' '.join(absent)}, there",
            )
    for other in ranks[1:]:
        for name, version in first.versions.items():
            if other.versions.get(name) != version:
                return fail(
                    "software",
                    f"{name} is {version} on rank 0 ({first.host}), but "
                    f"{other.versions.get(name)} on rank {other.rank} ({other.host})",
                    cure="use one environment on every host, such as one on a shared file system",
                )
    return ok(
        "software", ", ".join(f"{name} {version}" for name, version in first.versions.items())
    )


def judge_extras() -> Finding:
    """What is installed of the libraries that only some tasks need; none is not a fault."""
    found = {name: installed_version(name) for name in EXTRAS}
    present = [f"{name} {version}" for name, version in found.items() if version]
    absent = [EXTRAS[name] for name, version in found.items() if not version]
    said = ", ".join(present) or "none"
    if absent:
        said += (
            f"\nnot installed, where a task needs one: pip install 'dearmpi[{','.join(absent)}]'"
        )
    return ok("extras", said)


def judge_workers(
    start_method: str, infiniband: Sequence[str], environment: Mapping[str, str]
) -> Finding:
    """Whether the processes of data loaders may be started after MPI.

    start_method: multiprocessing's default. A fork copies memory that an InfiniBand adapter may
    be reading; over TCP and shared memory it does no harm that is known.
    """
    if start_method != "fork":
        return ok("workers", f"multiprocessing starts processes by {start_method}, which suits MPI")
    if infiniband and not any(environment.get(name) for name in _FORK_SAFE):
        return warn(
            "workers",
            f"multiprocessing forks by default, and {', '.join(infiniband)} may corrupt memory "
            "that a fork shares",
            cure="give data loaders multiprocessing_context='forkserver', or set "
            f"{_FORK_SAFE[0]}=1 for all ranks",
        )
    return ok(
        "workers",
        "multiprocessing forks by default; give data loaders with workers "
        "multiprocessing_context='forkserver'",
    )
