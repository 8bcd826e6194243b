"""Does a run that resumes on other numbers of ranks, with other buckets, compute the same?

Usage: python -m benchmarks.resizing

Trains the small task of benchmarks/faults.py, without dropout and in fp64, in five stages on 4, 2,
3, 1 and 4 ranks, each with buckets and a schedule of its own, resumed from the checkpoint of the
one before; once with each way to gather, which the third stage exchanges. Compares with 4 ranks
that never stop: each step's loss, and the parameters and the optimizer's moments at every change.
Prints the largest differences, relative to the largest number of each tensor, and exits with 1 if
one exceeds 1e-10.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.faults import ROOT, TASK, read_losses
from dearmpi.train import checkpoint
from tests.job import run_job

STEPS_PER_STAGE = 12
GATHERS = ("parameters", "gradients")
# Ranks, MiB that a bucket holds, schedule.
STAGES = (
    (4, 0.1, "dear"),
    (2, 0.3, "wfbp"),
    (3, 0.02, "dear"),
    (1, 1.0, "dear"),
    (4, 0.05, "serial"),
)
MOST = 1e-10
LIMIT_S = 120.0


def main() -> int:
    worst = 0.0
    with tempfile.TemporaryDirectory(prefix="dear-resizing-") as name:
        folder = Path(name)
        (folder / "sines.py").write_text(TASK.replace("nn.Dropout(0.1), ", ""))
        num_steps = STEPS_PER_STAGE * len(STAGES)
        run_stage(folder, "whole", STAGES[0], GATHERS[0], num_steps=num_steps)
        for number, gather in enumerate(GATHERS):
            for index, stage in enumerate(STAGES):
                what = GATHERS[1 - number] if index == 2 else gather
                end = STEPS_PER_STAGE * (index + 1)
                run_stage(folder, gather, stage, what, num_steps=end)
                differences = list(compare(folder / "runs", gather, end))
                worst = max(worst, *differences)
                print(
                    f"step {end}, after {stage[0]} ranks, {what} gathered: state of "
                    f"{len(differences) - 1} tensors and losses within {max(differences):.1e}",
                    flush=True,
                )
    return 1 if worst > MOST else 0


def run_stage(
    folder: Path, name: str, stage: tuple[int, float, str], gather: str, *, num_steps: int
) -> None:
    """Go on with the run ``name`` to ``num_steps``."""
    ranks, cap_mb, schedule = stage
    arguments = [
        *("run", "--task", f"{folder}/sines.py:make", "--name", name, "--resume", "auto"),
        *("--max-steps", str(num_steps), "--batch-size", "16", "--log-interval", "1"),
        *("--checkpoint-interval", str(STEPS_PER_STAGE), "--keep", "9", "--precision", "fp64"),
        *("--bucket-cap-mb", str(cap_mb), "--schedule", schedule, "--gather", gather),
        *("--lr", "0.001", "--run-folder", f"{folder}/runs"),
    ]
    ended = run_job(
        [sys.executable, "-m", "dearmpi.cli.main", *arguments],
        ranks=ranks,
        limit_s=LIMIT_S,
        folder=folder,
        environment={"PYTHONPATH": str(ROOT)},
    )
    if ended.returncode:
        raise RuntimeError(f"{name} on {ranks} ranks ended with {ended.returncode}: {ended.output}")


def compare(runs: Path, name: str, step: int) -> Iterator[float]:
    """Relative differences of every tensor of the state after ``step``, and of the losses."""
    found, wanted = (
        checkpoint.load(runs / run / "checkpoints" / f"step-{step:08d}") for run in (name, "whole")
    )
    assert found.optimizer.keys() == wanted.optimizer.keys() and wanted.optimizer
    for key, tensor in wanted.model.items():
        yield difference(found.model[key], tensor)
    for key, state in wanted.optimizer.items():
        for part, value in state.items():
            other = found.optimizer[key][part]
            if isinstance(value, Tensor) and isinstance(other, Tensor):
                yield difference(other, value)
            else:
                assert value == other
    pairs = zip(read_losses(runs / name), read_losses(runs / "whole"), strict=False)
    yield max(abs((one or 0) - (other or 0)) / (other or 1) for (_, one), (_, other) in pairs)


def difference(one: Tensor, other: Tensor) -> float:
    """Relative to the largest number of ``other``; infinite where one of them is not finite."""
    if torch.equal(one, other):
        return 0.0
    found = float((one - other).abs().max() / other.abs().max())
    return found if math.isfinite(found) else math.inf


if __name__ == "__main__":
    sys.exit(main())
