"""A loop of Lightning's Fabric."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torchmetrics
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from tests.frameworks.scripts.options import BATCH, EPOCHS, Rows, network, parse


def main() -> None:
    """Train, save after the first epoch, evaluate."""
    options = parse()
    strategy: Any = "ddp" if options.processes > 1 else "auto"
    if options.explicit:
        from dearmpi.integrations.lightning import DearFabricStrategy

        strategy = DearFabricStrategy()
    fabric = Fabric(accelerator="cpu", devices=options.processes, strategy=strategy)
    fabric.launch()
    inner = network()
    own = torch.optim.AdamW(inner.parameters(), lr=0.01)
    model, optimizer = fabric.setup(inner, own)
    scheduler = torch.optim.lr_scheduler.StepLR(own, 4, 0.5)
    batch = BATCH // fabric.world_size
    loader = fabric.setup_dataloaders(DataLoader(Rows(), batch_size=batch))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    path = Path(options.folder, "checkpoint")
    if options.resume:
        fabric.load(options.resume, state)
    norms = []
    for epoch in range(1 if options.resume else 0, EPOCHS):
        for number, inputs in enumerate(loader):
            is_adding = number % 2 == 0
            with fabric.no_backward_sync(model, enabled=is_adding and fabric.world_size > 1):
                loss = (model(inputs["x"])[:, 0] - inputs["labels"]).square().mean()
                fabric.backward(loss / 2)
            if not is_adding:
                norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.5)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        if epoch == 0:
            fabric.save(path, state)
        fabric.print(f"epoch {epoch} is over")
    error = torchmetrics.MeanSquaredError().set_dtype(torch.float64)
    outputs = []
    for inputs in fabric.setup_dataloaders(DataLoader(Rows(24), batch_size=batch)):
        with torch.no_grad():
            found = model(inputs["x"])[:, 0]
        error.update(found, inputs["labels"])
        outputs.append(float(fabric.all_reduce(found.mean(), reduce_op="mean")))
    seen = [*norms[-6:], *outputs, float(error.compute()), *scheduler.get_last_lr()]
    if fabric.is_global_zero:
        torch.save({"model": inner.state_dict(), "seen": seen}, options.out)


if __name__ == "__main__":
    main()
