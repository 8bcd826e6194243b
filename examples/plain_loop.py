"""The plain loop: mpirun -n 2 python examples/plain_loop.py

Every rank trains on its own samples; rank 0 prints.
"""

import torch
from torch import nn

import dearmpi


def main() -> None:
    world = dearmpi.connect()
    torch.manual_seed(world.rank)  # other samples on every rank; rank 0's weights go to all
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = dearmpi.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)

    for step in range(60):
        inputs = torch.randn(32, 16)
        targets = inputs.sum(dim=1, keepdim=True)
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % 20 == 0 or step == 59:
            mean = world.all_reduce([loss.item()])[0] / world.size  # on every rank
            if world.is_root:
                print(f"step {step}: loss {mean:.4f}")

    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}  # on every rank
    if world.is_root:
        print(f"done: {len(state['optimizer']['state'])} parameters have state")


if __name__ == "__main__":
    main()
