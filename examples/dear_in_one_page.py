"""The whole idea of dearmpi in one page of mpi4py and torch. Run it:

    mpirun -n 2 python examples/dear_in_one_page.py

Data-parallel training averages gradients with an all-reduce. DeAR (arXiv 2302.12445) splits it:

1. reduce-scatter, during backprop: each rank gets the sum of its own shard of a bucket;
2. update: each rank steps its optimizer on that shard alone;
3. all-gather, during the next forward: each rank sends its shard of the new parameters.

A bucket is one flat buffer that several parameters lie in. P ranks cut it into P equal shards.
MPI makes progress inside MPI calls only, so every hook polls; the package has a thread for it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.optim import Optimizer


class Bucket:
    """Parameters that travel together; their values and gradients are views of flat buffers."""

    def __init__(self, params: list[nn.Parameter], comm: MPI.Comm) -> None:
        numel = sum(param.numel() for param in params)
        shard = -(-numel // comm.size)  # rounded up: the last shard has some padding
        self.values = torch.zeros(shard * comm.size, dtype=params[0].dtype)
        self.grads = torch.zeros_like(self.values)
        start = 0
        for param in params:
            stop = start + param.numel()
            self.values[start:stop] = param.detach().flatten()
            param.data = self.values[start:stop].view(param.shape)
            param.grad = self.grads[start:stop].view(param.shape)  # autograd adds into it
            start = stop
        self.own_values = self.values[comm.rank * shard : (comm.rank + 1) * shard]
        self.own_grads = torch.zeros_like(self.own_values)
        self.num_params, self.num_ready = len(params), 0
        self.reduce = self.gather = MPI.REQUEST_NULL


class DearOptimizer:
    """Steps ``make_optimizer`` on shards; ``num_buckets`` tells how finely to pipeline."""

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[list[Tensor]], Optimizer],
        comm: MPI.Comm,
        num_buckets: int = 3,
    ) -> None:
        self.comm = comm
        layers = [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))]
        per_bucket = -(-len(layers) // num_buckets)
        self.buckets: list[Bucket] = []  # in feed-forward order
        for first in range(0, len(layers), per_bucket):
            group = layers[first : first + per_bucket]
            params = [param for layer in group for param in layer.parameters(recurse=False)]
            bucket = Bucket(params, comm)
            comm.Bcast(bucket.values.numpy())  # all ranks begin with rank 0's values
            self.buckets.append(bucket)
            for layer in group:
                layer.register_forward_pre_hook(lambda *_, bucket=bucket: self.wait_gather(bucket))
            for param in params:
                param.register_post_accumulate_grad_hook(
                    lambda _, bucket=bucket: self.register_grad_ready(bucket)
                )
        self.optimizer = make_optimizer([bucket.own_values for bucket in self.buckets])
        self.queue: list[Bucket] = []  # whose all-gathers are still to start

    def register_grad_ready(self, bucket: Bucket) -> None:
        """Phase 1, in backprop: the last gradient of a bucket starts its reduce-scatter."""
        bucket.num_ready += 1
        if bucket.num_ready == bucket.num_params:
            bucket.reduce = self.comm.Ireduce_scatter_block(
                bucket.grads.numpy(), bucket.own_grads.numpy()
            )
        self.poll()

    def step(self) -> None:
        """Phase 2: update the own shards, then queue the all-gathers in feed-forward order."""
        for bucket in self.buckets:
            bucket.reduce.Wait()
            bucket.own_values.grad = bucket.own_grads / self.comm.size
        self.optimizer.step()
        for bucket in self.buckets:
            bucket.grads.zero_()
            bucket.num_ready = 0
        self.queue = list(self.buckets)
        self.poll()

    def poll(self) -> None:
        """Let MPI go on. One all-gather is under way at a time, so that the first arrives first."""
        for bucket in self.buckets:
            bucket.reduce.Test()
            if not bucket.gather.Test():
                return
        if self.queue:
            bucket = self.queue.pop(0)
            bucket.gather = self.comm.Iallgather(MPI.IN_PLACE, bucket.values.numpy())

    def wait_gather(self, bucket: Bucket) -> None:
        """Phase 3, in the next forward: a layer waits for its own bucket, and no other."""
        while bucket in self.queue or not bucket.gather.Test():
            self.poll()

    def synchronize(self) -> None:
        """Wait until all parameters show the last step, as before they are saved."""
        for bucket in self.buckets:
            self.wait_gather(bucket)


def main() -> None:
    """Fit a small network to a sum of sines on all ranks."""
    comm = MPI.COMM_WORLD
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    ).double()
    optimizer = DearOptimizer(model, lambda shards: torch.optim.Adam(shards, lr=0.01), comm)
    generator = torch.Generator().manual_seed(1 + comm.rank)  # each rank has data of its own
    for iteration in range(201):
        inputs = torch.randn(32, 8, generator=generator, dtype=torch.float64)
        loss = nn.functional.mse_loss(model(inputs), inputs.sin().sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        if iteration % 50 == 0 and comm.rank == 0:
            print(f"iteration {iteration:3d}  loss {loss.item():.4f}")
    optimizer.synchronize()


if __name__ == "__main__":
    main()
