"""Lightning's Trainer, with one optimizer by its own loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import grad_norm
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from tests.frameworks.scripts.options import BATCH, EPOCHS, Rows, network, parse

Batch = dict[str, Tensor]


class Regression(lightning.LightningModule):  # type: ignore[misc]
    """Learns sums."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()
        self.error = torchmetrics.MeanSquaredError().set_dtype(torch.float64)
        self.norms: list[float] = []

    def training_step(self, batch: Batch, number: int) -> Tensor:
        """The loss of a batch."""
        loss: Tensor = (self.body(batch["x"])[:, 0] - batch["labels"]).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Note the norm of the averaged gradients."""
        self.norms.append(float(grad_norm(self.body, 2)["grad_2.0_norm_total"]))

    def validation_step(self, batch: Batch, number: int) -> None:
        """A metric over all ranks, and a mean."""
        outputs = self.body(batch["x"])[:, 0]
        self.error(outputs, batch["labels"])
        self.log("error", self.error)
        self.log("mean", outputs.mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """AdamW and a scheduler by steps."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        by_step = {"scheduler": scheduler, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": by_step}


def main() -> None:
    """Train, save each epoch, validate."""
    options = parse()
    strategy: Any = "ddp" if options.processes > 1 else "auto"
    if options.explicit:
        from dearmpi.integrations.lightning import DearStrategy

        strategy = DearStrategy()
    saves = ModelCheckpoint(options.folder, filename="{epoch}", save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=options.processes,
        strategy=strategy,
        max_epochs=EPOCHS,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=[saves],
        logger=CSVLogger(options.folder),
        log_every_n_steps=1,
        use_distributed_sampler=False,  # which would shuffle
        enable_progress_bar=False,
        enable_model_summary=False,
    )

    def loader(rows: Rows) -> Any:
        sampler: Any = DistributedSampler(
            rows, options.processes, trainer.global_rank, shuffle=False
        )
        return DataLoader(rows, batch_size=BATCH // options.processes, sampler=sampler)

    model = Regression()
    trainer.fit(model, loader(Rows()), loader(Rows(24)), ckpt_path=options.resume)
    (found,) = trainer.validate(model, loader(Rows(24)), verbose=False)
    assert trainer.world_size == options.processes
    if trainer.is_global_zero:
        lines = Path(trainer.logger.log_dir, "metrics.csv").read_text().splitlines()
        head = lines[0].split(",").index("loss")
        losses = [float(line.split(",")[head]) for line in lines[1:] if line.split(",")[head]]
        seen = [*model.norms[-6:], *losses[-6:], *found.values()]
        torch.save({"model": model.body.state_dict(), "seen": seen}, options.out)


if __name__ == "__main__":
    main()
