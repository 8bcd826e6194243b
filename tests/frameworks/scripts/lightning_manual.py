"""Lightning's manual optimization: two optimizers step in each training step."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from tests.frameworks.scripts.options import BATCH, EPOCHS, Rows, network, parse


class Two(lightning.LightningModule):  # type: ignore[misc]
    """The second network learns from the first."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = network(), nn.Linear(1, 1).double()

    def training_step(self, batch: dict[str, Tensor], number: int) -> None:
        """Two losses, backwards and steps."""
        for place, optimizer in enumerate(self.optimizers()):
            outputs = self.first(batch["x"])
            outputs = self.second(outputs.detach()) if place else outputs
            optimizer.zero_grad()
            self.manual_backward((outputs[:, 0] - batch["labels"]).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        """One for each network."""
        return [
            torch.optim.AdamW(self.first.parameters(), lr=0.01),
            torch.optim.SGD(self.second.parameters(), lr=0.01, momentum=0.9),
        ]


def main() -> None:
    """Train."""
    options = parse()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=options.processes,
        strategy="ddp_find_unused_parameters_true" if options.processes > 1 else "auto",
        max_epochs=EPOCHS,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = Rows()
    sampler: Any = DistributedSampler(rows, options.processes, trainer.global_rank, shuffle=False)
    model = Two()
    trainer.fit(model, DataLoader(rows, batch_size=BATCH // options.processes, sampler=sampler))
    if trainer.is_global_zero:
        torch.save({"model": model.state_dict(), "seen": []}, options.out)


if __name__ == "__main__":
    main()
