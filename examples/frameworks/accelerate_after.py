"""After: accelerate over MPI. mpirun -n 2 python accelerate_after.py"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dearmpi.integrations.accelerate import Accelerator


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2, step_scheduler_with_optimizer=False)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    loader = DataLoader(data, batch_size=8 // accelerator.num_processes)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    for epoch in range(2):
        for batch, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(batch), targets))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
        with torch.no_grad():
            errors = [accelerator.gather_for_metrics(model(x) - y) for x, y in loader]
        accelerator.print(f"epoch {epoch}: {torch.cat(errors).square().mean().item():.10f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
