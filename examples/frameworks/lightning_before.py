"""Before: Lightning's Trainer. python lightning_before.py RANKS"""

import sys

import lightning
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Regression(lightning.LightningModule):
    """Learns sums."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).double()
        self.error = torchmetrics.MeanSquaredError().set_dtype(torch.float64)

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.body(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
        self.error(self.body(batch[0]), batch[1])
        self.log("error", self.error)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def main(ranks: int) -> None:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp",
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(0)
    inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    sampler = DistributedSampler(data, ranks, trainer.global_rank, shuffle=False)
    loader = DataLoader(data, batch_size=8 // ranks, sampler=sampler)
    model = Regression()
    trainer.fit(model, loader)
    (found,) = trainer.validate(model, loader, verbose=False)
    if trainer.is_global_zero:
        print(f"error {found['error']:.10f}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
