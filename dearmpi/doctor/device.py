"""Device: CUDA devices, and which operations MPI does on their memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dearmpi.config import EngineConfig
from dearmpi.doctor.facts import RankFacts
from dearmpi.doctor.finding import Finding, ok, warn
from dearmpi.engine.device.transport import choose_transport
from dearmpi.tune.device_probe import Verdict


def judge_devices(ranks: Sequence[RankFacts], verdicts: Sequence[Verdict]) -> Finding:
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
    way = choose_transport("auto", EngineConfig().reduce_scatter, verdicts, num_hosts=num_hosts)
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


def _describe_verdicts(verdicts: Sequence[Verdict]) -> str:
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


def _reason(broken: Sequence[Verdict]) -> str:
    """The line of a failure's output that says most: the last that is not empty."""
    lines = [line.strip() for verdict in broken[:1] for line in verdict.output.splitlines()]
    said = [line for line in lines if line]
    return f" ({said[-1][:120]})" if said else ""
