"""Does a model learn as much when its gradients and parameters travel in half precision?

Runs tasks of `dear-train run` with each comm_dtype and several seeds, and compares the losses on
held-out data that they end with. What seeds differ by is the noise to judge by.

Usage: python benchmarks/convergence.py [TASK:STEPS ...]; by default bytes-lm:200 digits:200
Runs on 4 ranks of this machine, from the folder of the repository.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

TASKS = ("bytes-lm:200", "digits:200")
COMM_DTYPES = ("fp32", "bf16", "fp16")
SEEDS = (0, 1, 2)
RANKS = 4
LIMIT_S = 200


def train(task: str, steps: str, comm_dtype: str, seed: int) -> float:
    """The loss on held-out data after ``steps`` steps."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["mpirun", "-n", str(RANKS), "dear-train", "run", "--task", task]
        command += ["--max-steps", steps, "--comm-dtype", comm_dtype, "--seed", str(seed)]
        command += ["--eval-interval", "0", "--run-folder", folder, "--name", "run"]
        subprocess.run(
            command,
            check=True,
            stdout=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            timeout=LIMIT_S,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        rows = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(row).get("eval_loss") for row in rows]
    return float([loss for loss in losses if loss is not None][-1])


def main() -> None:
    """A line for each task and comm_dtype: mean and standard deviation over the seeds."""
    for choice in sys.argv[1:] or TASKS:
        task, _, steps = choice.partition(":")
        for comm_dtype in COMM_DTYPES:
            losses = [train(task, steps, comm_dtype, seed) for seed in SEEDS]
            each = ", ".join(f"{loss:.4f}" for loss in losses)
            mean, spread = statistics.fmean(losses), statistics.stdev(losses)
            print(f"{task} {comm_dtype}: {mean:.4f} +- {spread:.4f}  ({each})", flush=True)


if __name__ == "__main__":
    main()
