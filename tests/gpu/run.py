"""All checks that need a GPU, in one command of less than 8 minutes, with a table at the end.

    python tests/gpu/run.py            # or --dry: on the host, on next to nothing

Files (profiles, a trace, what the parts print) go to the folder OUT names, else gpu-results. Exit
status: 0 if every part ended well, or if there is no GPU, which is said.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
if str(ROOT) not in sys.path:  # run as a file
    sys.path.insert(0, str(ROOT))

LIMIT_S = 470.0


@dataclass(frozen=True, slots=True)
class Part:
    """A module of this folder, on so many ranks; limit_s: what it may take."""

    module: str
    ranks: int
    limit_s: float


PARTS = (
    Part("copies", 1, 40),
    Part("parity", 2, 90),
    Part("parity", 3, 90),
    Part("iteration_times", 2, 120),
    Part("overlap", 2, 60),
    Part("iteration_times", 4, 150),
    Part("profiles", 1, 90),
)


def main() -> int:
    """Run the parts one after the other."""
    is_dry = "--dry" in sys.argv[1:]
    reason = "" if is_dry else reason_to_skip()
    if reason:
        print(f"skipped: {reason}")
        return 0
    from tests.gpu.machine import FOLDER, rows_of

    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "log.txt").unlink(missing_ok=True)
    began_s = time.monotonic()
    rows: list[list[str]] = []
    failed = False
    for part in PARTS:
        left_s = LIMIT_S - (time.monotonic() - began_s)
        if left_s < 20:
            rows.append([part.module, f"{part.ranks} ranks", "left out: no time left"])
            continue
        limit_s = min(part.limit_s, left_s)
        output, code = run_part(part, folder=FOLDER.resolve(), limit_s=limit_s, is_dry=is_dry)
        with (FOLDER / "log.txt").open("a") as log:
            log.write(f"----- {part.module} on {part.ranks} ranks: {code}\n{output}")
        rows += rows_of(output)
        if code:
            failed = True
            last = "\n".join(output.splitlines()[-25:])
            print(
                f"----- {part.module} on {part.ranks} ranks ended with {code}:\n{last}", flush=True
            )
            rows.append([part.module, f"{part.ranks} ranks", f"FAILED ({code})"])
    tell(rows, time.monotonic() - began_s)
    return int(failed)


def reason_to_skip() -> str:
    """Why nothing can be checked here; empty if it can."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return ""


def run_part(
    part: Part,
    *,
    folder: Path,
    limit_s: float,
    is_dry: bool,
    python: Sequence[str | Path] = (sys.executable,),
) -> tuple[str, int]:
    """What it prints, and its exit status; 124 if its time ran out. Its files go to ``folder``.

    python: the command that starts Python.
    """
    command = [*map(str, python), "-m", f"tests.gpu.{part.module}"]
    if part.ranks > 1:
        mpiexec = Path(sys.executable).with_name("mpiexec")
        launcher = str(mpiexec) if mpiexec.exists() else "mpiexec"
        command = [launcher, "-n", str(part.ranks), *command]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "OUT": str(folder)}
    environment |= {"DEARMPI_GPU_DRY": "1"} if is_dry else {}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=limit_s)[0], process.returncode
    except subprocess.TimeoutExpired:
        process.terminate()  # the launcher ends its ranks
        try:
            return process.communicate(timeout=10)[0], 124
        except subprocess.TimeoutExpired:
            process.kill()
            return process.communicate()[0], 124


def tell(rows: list[list[str]], seconds: float) -> None:
    """The table."""
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    print()
    for what, where, figure in rows:
        print(f"{what:<{widths[0]}}  {where:<{widths[1]}}  {figure}")
    print(f"\n{seconds:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
