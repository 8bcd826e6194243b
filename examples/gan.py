"""Two models, two optimizers: mpirun -n 2 python examples/gan.py

The generator learns to place points on a circle; its backprop passes through the critic.
"""

import torch
from torch import Tensor, nn

import dearmpi


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs))


def circle(count: int) -> Tensor:
    angles = torch.rand(count) * 2 * torch.pi
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def switch(params: list[nn.Parameter], *, on: bool) -> None:
    for param in params:
        param.requires_grad_(on)


def main() -> None:
    world = dearmpi.connect()
    torch.manual_seed(world.rank)
    generator, critic = network(8, 2), network(2, 1)
    for_generator = dearmpi.DistributedOptimizer(
        torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.99)), generator
    )
    for_critic = dearmpi.DistributedOptimizer(
        torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.99)), critic
    )
    of_critic = list(critic.parameters())  # critic.requires_grad_() would wait for their values
    loss = nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)

    for step in range(150):
        made = generator(torch.randn(64, 8))
        critic_loss = loss(critic(circle(64)), ones) + loss(critic(made.detach()), zeros)
        critic_loss.backward()
        for_critic.step()
        for_critic.zero_grad()

        switch(of_critic, on=False)  # its gradients would be reduced, only to be dropped
        generator_loss = loss(critic(made), ones)
        generator_loss.backward()
        for_generator.step()
        for_generator.zero_grad()
        switch(of_critic, on=True)
        if world.is_root and (step % 50 == 0 or step == 149):
            print(f"step {step}: critic {critic_loss:.3f}, generator {generator_loss:.3f}")

    with torch.no_grad():
        radius = generator(torch.randn(256, 8)).norm(dim=1).mean()
    mean = world.all_reduce([radius.item()])[0] / world.size
    if world.is_root:
        print(f"done: mean radius {mean:.2f}")


if __name__ == "__main__":
    main()
