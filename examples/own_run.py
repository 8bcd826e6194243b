"""A loop of one's own with checkpoints: mpirun -n 2 python examples/own_run.py runs/own

Send a rank SIGUSR1, and the job saves and ends with exit code 75. The same command goes on, on any
number of ranks: mpirun -n 3 python examples/own_run.py runs/own
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dearmpi


def main() -> None:
    world = dearmpi.connect()
    torch.manual_seed(0)
    inputs = torch.randn(512, 16)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = dearmpi.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)

    with dearmpi.Run(sys.argv[1], model, optimizer, states={"scheduler": scheduler}) as run:
        start = run.resume()
        sampler = run.sampler(len(data), batch_size=60, num_steps=200)  # over all ranks
        for batch, targets in DataLoader(data, batch_sampler=sampler):
            loss = nn.functional.mse_loss(model(batch), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            run.log(loss)  # counts the step, and writes a row of metrics every tenth one
            if world.is_root and run.step in (start + 1, 200):
                print(f"step {run.step}: loss {loss.item():.4f}")
            if run.step % 50 == 0:
                run.save()  # written while the next steps are taken
            if run.should_stop:
                break  # the end of the block saves, and exits with 75

    if world.is_root:
        print("done")


if __name__ == "__main__":
    main()
