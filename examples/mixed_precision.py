"""fp16 autocast with loss scaling: mpirun -n 2 python examples/mixed_precision.py

With torch.bfloat16 no scaler is needed.
"""

import torch
from torch import nn

import dearmpi


def main() -> None:
    world = dearmpi.connect()
    torch.manual_seed(world.rank)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = dearmpi.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    # An overflow on one rank skips the step on all of them. 2**20 is too much on purpose.
    scaler = dearmpi.GradScaler("cpu", init_scale=2.0**20)

    for step in range(60):
        inputs = torch.randn(32, 16)
        targets = inputs.sum(dim=1, keepdim=True)
        with torch.autocast("cpu", dtype=torch.float16):
            outputs = model(inputs)
        loss = nn.functional.mse_loss(outputs.float(), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm_(5.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if world.is_root and (step % 20 == 0 or step == 59):
            print(f"step {step}: loss {loss.item():.4f}, scale {scaler.get_scale():.0f}")

    if world.is_root:
        print("done")


if __name__ == "__main__":
    main()
