"""What all scripts here share: their options and their data."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

ROWS = 96
BATCH = 8  # of all processes together
EPOCHS = 2


def parse() -> argparse.Namespace:
    """``folder``: of checkpoints; ``out``: what rank 0 writes at the end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--resume", help="the checkpoint to go on from")
    parser.add_argument("--explicit", action="store_true", help="by dearmpi.integrations")
    return parser.parse_args()


def network() -> nn.Sequential:
    """A small one, in fp64."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 30), nn.Tanh(), nn.Linear(30, 1)).double()


class Rows(Dataset[dict[str, Tensor]]):
    """Each row has its sum as its label."""

    def __init__(self, num: int = ROWS) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randn(num, 5, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"x": self.rows[number], "labels": self.rows[number].sum()}
