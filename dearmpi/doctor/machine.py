"""Machine: whether cores suffice, what MPI does on device memory, and whether software fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

from dearmpi.config import EngineConfig
from dearmpi.device.route_choice import choose_route
from dearmpi.doctor.finding import MISSING, Finding, RankFacts, fail, installed_version, ok, warn
from dearmpi.report.draw.units import count_text
from dearmpi.train.ranks.threads import HostCores, RankCores, by_host
from dearmpi.train.settings.sources import CONFIG_VARIABLE
from dearmpi.tune.device_probe import ProbeVerdict

_OWN_THREADS = "DEAR_TRAIN_THREADS"  # which wins over a file's threads and OMP_NUM_THREADS


def judge_cores(ranks: Sequence[RankFacts]) -> Finding:
    """Threads against cores on every host; the first host with too few is named."""
    for host in _by_host(ranks):
        problem = _judge_host(host, [rank for rank in ranks if rank.host == host.name])
        if problem is not None:
            return problem
    return ok("cores", "\n".join([_describe(ranks), *_describe_scripts(ranks)]))


def is_crowded(ranks: Sequence[RankFacts]) -> bool:
    """Whether some host has more ranks than cores for them."""
    return any(host.num_ranks > host.num_cores for host in _by_host(ranks))


def _by_host(ranks: Sequence[RankFacts]) -> list[HostCores]:
    return by_host(RankCores(rank.host, rank.cores, rank.threads) for rank in ranks)


def _judge_host(host: HostCores, ranks: Sequence[RankFacts]) -> Finding | None:
    if host.num_ranks > host.num_cores:
        return warn(
            "cores",
            f"{host.num_ranks} ranks on {host.name} share {count_text(host.num_cores, 'core')}: "
            "they take turns, and so do computation and communication",
            cure=f"start at most {host.num_cores} there; if {host.name} has more cores, the "
            "launcher binds too tightly: mpirun -bind-to none (MPICH), --bind-to none (Open MPI), "
            "or srun --cpus-per-task=N",
        )
    if host.num_threads > host.num_cores:
        each = max(1, host.num_cores // host.num_ranks)
        return warn(
            "cores",
            f"{host.num_threads} torch threads of {count_text(host.num_ranks, 'rank')} on "
            f"{host.name} want {count_text(host.num_cores, 'core')} "
            f"(threads {ranks[0].threads_reason})",
            cure=f"set {_variable(ranks[0])}={each}, or leave {_setting(ranks[0])}",
        )
    quota = min((rank.quota for rank in ranks if rank.quota is not None), default=None)
    if quota is not None and quota < host.num_threads:
        each = int(quota) // host.num_ranks
        return warn(
            "cores",
            f"the container on {host.name} may use {quota:g} cores' worth of time, but the torch "
            f"threads of its ranks want {host.num_threads}",
            cure="give the container more, or "
            + (
                f"set {_variable(ranks[0])}={each}"
                if each
                else f"start at most {count_text(max(1, int(quota)), 'rank')} there"
            ),
        )
    return None


def _variable(rank: RankFacts) -> str:
    """The one that wins over whatever gave the rank its threads."""
    return _OWN_THREADS if rank.threads_asked else "OMP_NUM_THREADS"


def _setting(rank: RankFacts) -> str:
    """What to leave so that nothing but the ranks' cores decides."""
    if rank.threads_asked and _OWN_THREADS not in rank.environment:
        return f"threads out of the file that {CONFIG_VARIABLE} names"
    return "it unset"


def _describe(ranks: Sequence[RankFacts]) -> str:
    """Each rank's cores where there are few ranks, else the least and the most."""
    own = [f"cores {abbreviate(rank.cores)}, threads {rank.threads}" for rank in ranks]
    if len(set(own)) == 1:
        return f"every rank: {own[0]} ({ranks[0].threads_reason})"
    if len(ranks) <= 4:
        return "; ".join(f"rank {rank.rank}: {text}" for rank, text in zip(ranks, own, strict=True))
    cores = sorted(len(rank.cores) for rank in ranks)
    threads = sorted(rank.threads for rank in ranks)
    return f"each rank may use {_range(cores, 'core')} and computes on {_range(threads, 'thread')}"


def _describe_scripts(ranks: Sequence[RankFacts]) -> list[str]:
    """What scripts are to be started with, where torch alone would take other threads."""
    if all(r.script_threads == r.threads or "OMP_NUM_THREADS" in r.environment for r in ranks):
        return []
    begun = sorted(rank.script_threads for rank in ranks)
    return [
        f"a script of your own begins with {_range(begun, 'thread')}: start it with "
        f"OMP_NUM_THREADS={min(rank.threads for rank in ranks)}"
    ]


def abbreviate(cores: Sequence[int]) -> str:
    """Core numbers with runs joined: 0-3,8."""
    runs = [
        [core for _, core in group]
        for _, group in groupby(enumerate(cores), lambda pair: pair[1] - pair[0])
    ]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _range(values: Sequence[int], noun: str) -> str:
    low, high = values[0], values[-1]
    return count_text(low, noun) if low == high else f"{low} to {high} {noun}s"


def judge_devices(ranks: Sequence[RankFacts], verdicts: Sequence[ProbeVerdict]) -> Finding:
    """verdicts: of rank 0's host; none where it has no device."""
    without = [rank for rank in ranks if not rank.devices]
    if len(without) == len(ranks):
        return _explain_none(ranks)
    if without:
        rank = without[0]
        return warn(
            "cuda",
            f"rank {rank.rank} on {rank.host} {rank.gpus.describe()}, but others can use theirs",
            cure=f"{rank.gpus.cure}, or leave the host out",
        )
    kinds = Counter(name for rank in ranks for name in set(rank.devices))
    said = f"{len(ranks[0].devices)} on {ranks[0].host}: {', '.join(kinds)}"
    num_hosts = len({rank.host for rank in ranks})
    way = choose_route("auto", EngineConfig().reduce_scatter, verdicts, num_hosts=num_hosts)
    return ok("cuda", f"{said}\n{_describe_verdicts(verdicts)}\ncuda_buffers auto: {way}")


def _explain_none(ranks: Sequence[RankFacts]) -> Finding:
    """All is well only where no host has any: one that lies idle is seldom meant to."""
    for rank in ranks:
        if rank.gpus.num_counted or rank.gpus.num_shown:
            return warn(
                "cuda",
                f"rank {rank.rank} on {rank.host} {rank.gpus.describe()}; tensors are on the host",
                cure=rank.gpus.cure,
            )
    return ok("cuda", "no device; tensors are on the host")


def _describe_verdicts(verdicts: Sequence[ProbeVerdict]) -> str:
    """Which operations work on device memory, and why others do not."""
    works = [verdict.operation for verdict in verdicts if verdict.works]
    broken = [verdict for verdict in verdicts if not verdict.works]
    if not works:
        return f"MPI does nothing on device memory{_reason(broken)}: copies go through the host"
    said = f"MPI does on device memory: {', '.join(works)}"
    if broken:
        names = ", ".join(verdict.operation for verdict in broken)
        said += f"; not: {names}{_reason(broken)}, which go through the host"
    return said


def _reason(broken: Sequence[ProbeVerdict]) -> str:
    """The line of a failure's output that says most: the last that is not empty."""
    lines = [line.strip() for verdict in broken[:1] for line in verdict.output.splitlines()]
    said = [line for line in lines if line]
    return f" ({said[-1][:120]})" if said else ""


# Distributions that only some tasks, models and trackers need, with the extra that brings each.
# The whole of mlflow installs mlflow-skinny too.
EXTRAS = {
    "scikit-learn": "digits",
    "Pillow": "images",
    "transformers": "transformers",
    "torchvision": "torchvision",
    "timm": "timm",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow-skinny": "mlflow",
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
    """What is installed of the libraries that some tasks and trackers need; none is no fault."""
    found = {name: installed_version(name) for name in EXTRAS}
    present = [f"{name} {version}" for name, version in found.items() if version]
    absent = [EXTRAS[name] for name, version in found.items() if not version]
    said = ", ".join(present) or "none"
    if absent:
        extras = ",".join(absent)
        said += (
            f"\nnot installed, where a task or tracker needs one: pip install 'dearmpi[{extras}]'"
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
