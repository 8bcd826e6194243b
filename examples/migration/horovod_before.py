"""Before: Horovod. horovodrun -np 2 python examples/migration/horovod_before.py"""

import horovod.torch as hvd
import torch
from torch import nn


def main() -> None:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))

    for _ in range(20):
        inputs = data[rank::size]
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()

    mean = hvd.allreduce(loss.detach(), name="loss").item()
    if rank == 0:
        print(f"mean loss {mean:.5f}")


if __name__ == "__main__":
    main()
