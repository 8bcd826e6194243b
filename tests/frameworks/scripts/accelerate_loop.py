"""A loop of accelerate's, and a metric of ``evaluate``."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import datasets
import evaluate
import torch
from torch.utils.data import DataLoader

from tests.frameworks.scripts.options import BATCH, EPOCHS, Rows, network, parse


class MeanSquare(evaluate.Metric):  # type: ignore[misc]
    """Of predictions."""

    def _info(self) -> Any:
        value = datasets.Value("float64")
        features = datasets.Features({"predictions": value, "references": value})
        return evaluate.MetricInfo("mean square", "", features)

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        pairs = zip(predictions, references, strict=True)
        squares = [(one - other) ** 2 for one, other in pairs]
        return {"value": sum(squares) / len(squares), "rows": len(squares)}


def main() -> None:
    """Train, save after the first epoch, evaluate."""
    options = parse()
    place = "dearmpi.integrations.accelerate" if options.explicit else "accelerate"
    accelerator = import_module(place).Accelerator(
        gradient_accumulation_steps=2, step_scheduler_with_optimizer=False
    )
    model: Any = network()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    batch = BATCH // accelerator.num_processes
    loader: Any = DataLoader(Rows(), batch_size=batch)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    norms = []
    if options.resume:
        accelerator.load_state(options.resume)
    for epoch in range(1 if options.resume else 0, EPOCHS):
        for inputs in loader:
            with accelerator.accumulate(model):
                loss = (model(inputs["x"])[:, 0] - inputs["labels"]).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
        if epoch == 0:
            accelerator.save_state(str(Path(options.folder, "checkpoint")))
        accelerator.print(f"epoch {epoch} is over")
    metric = MeanSquare(
        num_process=accelerator.num_processes,
        process_id=accelerator.process_index,
        experiment_id="evaluation",
        cache_dir=options.folder,
    )
    model.eval()
    seen = []
    # 21 rows: the last batches of the ranks are filled up, and cut again when they are gathered.
    for inputs in accelerator.prepare(DataLoader(Rows(21), batch_size=batch)):
        with torch.no_grad():
            outputs = model(inputs["x"])[:, 0]
        seen.append(accelerator.gather_for_metrics(outputs))
    for inputs in accelerator.prepare(DataLoader(Rows(24), batch_size=batch)):
        with torch.no_grad():
            metric.add_batch(predictions=model(inputs["x"])[:, 0], references=inputs["labels"])
    found = metric.compute()
    if accelerator.is_main_process:
        assert found is not None and found["rows"] == 24
        result = {
            "model": accelerator.unwrap_model(model).state_dict(),
            "seen": [*norms[-6:], found["value"], *scheduler.get_last_lr()],
            "evaluated": torch.cat(seen),
        }
        torch.save(result, options.out)
    accelerator.end_training()


if __name__ == "__main__":
    main()
