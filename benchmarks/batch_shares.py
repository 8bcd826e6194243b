"""What --batch-shares auto gains where one of four ranks is slower.

Usage: python -m benchmarks.batch_shares [SLOWER ...]; default: 2 1.3 1

Each layer of a small model sleeps for each sample, forward and in backprop, on rank 1 SLOWER times
as long, so that the machine's cores do not matter. Per SLOWER it trains evenly and with auto, and
prints the median over ten steps of the last half, the ratio, what is possible, and the samples of
each rank.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import dearmpi
from dearmpi.train.metrics import metrics
from dearmpi.train.tasks.task import Task
from tests.job import run_job

NUM_RANKS, SLOW_RANK = 4, 1
BATCH_SIZE, NUM_STEPS = 256, 80
NUM_LAYERS, SAMPLE_S = 4, 0.001  # of one layer, forward and in backprop each
LIMIT_S = 300.0


def build(options: Mapping[str, str]) -> Task:
    """The task. Option ``slower``: how many times as long the slow rank takes."""
    slower = float(options["slower"])
    slower = slower if dearmpi.connect().rank == SLOW_RANK else 1.0

    def sleep(module: nn.Module, given: Any, output: Any = None) -> None:
        time.sleep(slower * SAMPLE_S * len(given[0]))

    layers = [nn.Linear(16, 16) for _ in range(NUM_LAYERS)]
    for layer in layers:
        layer.register_forward_hook(sleep)
        layer.register_full_backward_pre_hook(sleep)
    data = torch.utils.data.TensorDataset(torch.randn(BATCH_SIZE * NUM_STEPS, 16))
    return Task("sleeping", nn.Sequential(*layers), data, lambda m, b: m(b[0]).square().mean())


def train(folder: Path, slower: float, shares: str) -> tuple[float, str]:
    """Seconds of a step, and the samples of each rank at the end."""
    name = f"{shares}-{slower:g}"
    arguments = [
        *("run", "--task", f"{__file__}:build", "--task-option", f"slower={slower}"),
        *("--batch-shares", shares, "--batch-size", str(BATCH_SIZE)),
        *("--max-steps", str(NUM_STEPS), "--optimizer", "SGD", "--lr", "0.01"),
        *("--run-folder", str(folder), "--name", name, "--log-interval", "10"),
    ]
    command = [sys.executable, "-m", "dearmpi.cli.main", *arguments]
    ended = run_job(command, ranks=NUM_RANKS, limit_s=LIMIT_S, folder=folder)
    if ended.returncode != 0:
        raise SystemExit(ended.output)
    found = re.findall(r"samples by rank: ([\d, ]+) of", ended.output)
    rows = metrics.read(folder / name)
    step_s = median(row.step_s for row in rows[len(rows) // 2 :] if row.step_s is not None)
    return step_s, found[-1] if found else "even"


def main(slower: list[float]) -> int:
    with tempfile.TemporaryDirectory(prefix="dear-shares-") as name:
        for one in slower:
            even_s, _ = train(Path(name), one, "even")
            auto_s, sizes = train(Path(name), one, "auto")
            best = one * (NUM_RANKS - 1 + 1 / one) / NUM_RANKS
            figures = {
                "slower": one,
                "even_s": round(even_s, 4),
                "auto_s": round(auto_s, 4),
                "ratio": round(even_s / auto_s, 3),
                "possible": round(best, 3),
                "samples": sizes,
            }
            print(json.dumps(figures), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main([float(text) for text in sys.argv[1:]] or [2.0, 1.3, 1.0]))
