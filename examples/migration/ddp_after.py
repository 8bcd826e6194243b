"""After: dearmpi. mpirun -n 2 python examples/migration/ddp_after.py"""

import torch
from torch import nn

import dearmpi


def main() -> None:
    world = dearmpi.connect()
    rank, size = world.rank, world.size
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = dearmpi.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model)
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))

    for _ in range(20):
        inputs = data[rank::size]
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()

    total = sum(param.double().sum().item() for param in model.parameters())
    if rank == 0:
        print(f"sum of parameters {total:.5f}")


if __name__ == "__main__":
    main()
