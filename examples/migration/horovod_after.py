"""After: dearmpi. mpirun -n 2 python examples/migration/horovod_after.py"""

import torch
from torch import nn

import dearmpi


def main() -> None:
    world = dearmpi.connect()
    rank, size = world.rank, world.size
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = dearmpi.DistributedOptimizer(optimizer, model)
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))

    for _ in range(20):
        inputs = data[rank::size]
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()

    mean = world.mean(loss)
    if rank == 0:
        print(f"mean loss {mean:.5f}")


if __name__ == "__main__":
    main()
