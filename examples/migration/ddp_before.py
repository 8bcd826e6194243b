"""Before: DistributedDataParallel. torchrun --nproc-per-node 2 examples/migration/ddp_before.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))

    for _ in range(20):
        inputs = data[rank::size]
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    total = sum(param.double().sum().item() for param in model.module.parameters())
    if rank == 0:
        print(f"sum of parameters {total:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
