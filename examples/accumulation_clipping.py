"""Gradient accumulation and clipping: mpirun -n 2 python examples/accumulation_clipping.py

Four backprops make one step. Only the last one communicates.
"""

from contextlib import nullcontext

import torch
from torch import nn

import dearmpi

NUM_MICRO_BATCHES = 4


def main() -> None:
    world = dearmpi.connect()
    torch.manual_seed(world.rank)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = dearmpi.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)

    for step in range(60):
        for micro_batch in range(NUM_MICRO_BATCHES):
            inputs = torch.randn(8, 16)
            targets = inputs.sum(dim=1, keepdim=True)
            is_last = micro_batch == NUM_MICRO_BATCHES - 1
            with nullcontext() if is_last else optimizer.no_sync():
                loss = nn.functional.mse_loss(model(inputs), targets) / NUM_MICRO_BATCHES
                loss.backward()
        # As torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), with a smaller exchange.
        norm = optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if world.is_root and (step % 20 == 0 or step == 59):
            print(f"step {step}: loss {loss.item() * NUM_MICRO_BATCHES:.4f}, norm {norm:.3f}")

    if world.is_root:
        print("done")


if __name__ == "__main__":
    main()
