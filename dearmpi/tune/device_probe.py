"""Whether MPI can work on device memory, tried in processes that may die of it.

That a library calls itself CUDA-aware does not say that a given operation is: some of them end the
process. So two ranks of this machine try them, outside of the job that asks, and before that job
initialises MPI. An operation that kills them is found by being the one that never reported. What
MPI does between hosts is not tried.
"""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, get_args

from dearmpi.config import ReduceScatter

if TYPE_CHECKING:
    from dearmpi.comm.api.collectives import Collectives, Request
    from dearmpi.comm.world import World

ALL_GATHER = "all-gather"
OPERATIONS: tuple[str, ...] = (ALL_GATHER, *get_args(ReduceScatter))
_PROGRAM = (sys.executable, "-m", "dearmpi.tune.device_probe")
_CLAIMS_CUDA = "from dearmpi.comm.backends import mpi; print(mpi.claims_cuda())"
_NUMEL = 1 << 16
_START_LIMIT_S = 120.0  # to import torch and to connect, on a machine that may be busy
_LIMIT_S = 30.0  # for an operation
_READY, _WORKS = "ready to try", "works: "
# What a launcher leaves in the environment of its ranks; a new launcher must not see it.
_LAUNCHED = (
    *("PMI_", "PMIX_", "OMPI_", "PRTE_", "HYDI_", "HYDRA_", "MPI_LOCAL", "SLURM_"),
    "MPI4PY_RC_",  # by which a rank keeps its workers from MPI
)
_KEPT = ("OMPI_MCA_", "OMPI_ALLOW_")


@dataclass(frozen=True, slots=True)
class ProbeVerdict:
    """Whether ``operation`` worked on device memory; where not, the end of what was printed."""

    operation: str
    works: bool
    output: str = ""


class _Probed:
    """MPI can be tried once in a process, before it is initialised there."""

    verdicts: ClassVar[tuple[ProbeVerdict, ...]] = ()


def probe_devices(*, always: bool = True) -> tuple[ProbeVerdict, ...]:
    """Find out what MPI does on CUDA memory, for ``cuda_buffers`` to go by; nothing without any.

    Call it before ``connect()``, on rank 0 at least; it takes seconds, in which others wait.
    always: try, even if the library itself says that it was built without CUDA.
    """
    import torch

    if torch.cuda.is_available() and not _Probed.verdicts and (always or _claims_cuda()):
        _Probed.verdicts = probe()
    return _Probed.verdicts


def _claims_cuda() -> bool:
    """What the library reports in a process of its own, where it is initialised for that."""
    try:
        reported = subprocess.run(
            [sys.executable, "-c", _CLAIMS_CUDA],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=_clean(os.environ),
            timeout=_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return reported.stdout.strip().endswith("True")


def known_verdicts() -> tuple[ProbeVerdict, ...]:
    """What this process has found out; none before ``probe_devices``."""
    return _Probed.verdicts


def share_verdicts(world: World, verdicts: Sequence[ProbeVerdict]) -> list[ProbeVerdict]:
    """Rank 0's on every rank (collective)."""
    text = world.broadcast_text(json.dumps([asdict(verdict) for verdict in verdicts]))
    return [ProbeVerdict(**plain) for plain in json.loads(text)]


def probe(device: str = "cuda", *, program: Sequence[str] = _PROGRAM) -> tuple[ProbeVerdict, ...]:
    """Try every operation. Must be called before this process initialises MPI.

    program: run with the device and operations as arguments; rank 0 prints ``ready to try`` once
        connected, and ``works: NAME`` for each that does, before any rank tries the next.
    """
    verdicts: list[ProbeVerdict] = []
    while left := OPERATIONS[len(verdicts) :]:
        output = _run([*program, device, *left])
        num_works = output.count(_WORKS)
        verdicts += [ProbeVerdict(name, works=True) for name in left[:num_works]]
        # What never got so far as to try would fail in the same way each time.
        culprits = left[num_works : num_works + 1] if _READY in output else left
        verdicts += [ProbeVerdict(name, works=False, output=output[-2000:]) for name in culprits]
    return tuple(verdicts)


def _run(command: Sequence[str]) -> str:
    """The output of ``command`` on two ranks of this machine."""
    own = Path(sys.executable).with_name("mpiexec")
    mpiexec = str(own) if own.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        return "there is no mpiexec to start two ranks with"
    # What ends a rank may print anything.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        # Ranks end themselves; the launcher gets a little longer to notice.
        try:
            subprocess.run(
                [mpiexec, "-n", "2", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_clean(os.environ),
                timeout=_START_LIMIT_S + len(OPERATIONS) * _LIMIT_S + 10,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            output.write(f"{error}\n")
        output.seek(0)
        return output.read()


def _clean(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` for a launcher on this machine, whatever started this process."""
    kept = {
        name: value
        for name, value in environment.items()
        if not name.startswith(_LAUNCHED) or name.startswith(_KEPT)
    }
    oversubscribed = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    return kept | {"HYDRA_LAUNCHER": "fork"} | oversubscribed


def main(arguments: Sequence[str]) -> int:
    """Be one of the two ranks: try operations on memory of a device, and report each."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(_START_LIMIT_S, exit=True)
    import torch  # here, since it takes long and is no operation's time

    from dearmpi.comm.backends.mpi import connect

    kind, *operations = arguments
    collectives = connect()
    device = _device_of(collectives.rank, kind)
    torch.zeros(1, device=device)  # a device takes seconds to get ready, also no operation's time
    _say(collectives, _READY)
    for operation in operations:
        faulthandler.dump_traceback_later(_LIMIT_S, exit=True)
        works = _works(collectives, device, operation)
        if not works:
            print(f"{operation} on {device} memory gave wrong numbers", flush=True)
        if not _on_all(collectives, works):
            collectives.abort(1)
        _say(collectives, f"{_WORKS}{operation}")
    return 0


def _device_of(rank: int, kind: str) -> str:
    """A device of its own for each rank, if there are two: MPI copies another way between them."""
    import torch

    if kind != "cuda":
        return kind
    index = rank % torch.cuda.device_count()
    torch.cuda.set_device(index)  # MPI looks for the context of the thread that calls it
    return f"cuda:{index}"


def _say(collectives: Collectives, text: str) -> None:
    """Print ``text`` on rank 0 before any rank goes on: what comes next may end them all."""
    import torch

    if collectives.rank == 0:
        print(text, flush=True)
    _wait(lambda: collectives.start_broadcast(torch.zeros(1), 0))


def _on_all(collectives: Collectives, works: bool) -> bool:
    """Whether it works for both ranks; the numbers are in host memory, where all is well."""
    import torch

    result = torch.tensor([float(works)], dtype=torch.float64, device="cpu")
    _wait(lambda: collectives.start_all_reduce(result, "min"))
    return result.item() > 0


def _works(collectives: Collectives, device: str, operation: str) -> bool:
    """Do it once, with numbers whose result is known."""
    import torch

    size, rank = collectives.size, collectives.rank
    buffer = torch.full((_NUMEL * size,), float(rank + 1), device=device)
    own = slice(rank * _NUMEL, (rank + 1) * _NUMEL)
    if buffer.is_cuda:
        torch.cuda.synchronize()  # MPI reads the memory behind the stream's back
    if operation == ALL_GATHER:
        expected = torch.arange(1.0, size + 1).repeat_interleave(_NUMEL)
        _wait(lambda: collectives.start_all_gather(buffer))
        return torch.equal(buffer.cpu(), expected)
    algorithm = next(name for name in get_args(ReduceScatter) if name == operation)
    _wait(lambda: collectives.start_reduce_scatter(buffer, algorithm))
    return torch.equal(buffer[own].cpu(), torch.full((_NUMEL,), size * (size + 1) / 2))


def _wait(start: Callable[[], Request]) -> None:
    request = start()
    while not request.test():
        time.sleep(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
