"""transformers' Trainer."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from tests.frameworks.scripts.options import BATCH, EPOCHS, Rows, network, parse

SAVE_STEPS = 6


class Net(nn.Module):
    """As the Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = self.body(x)
        return {"loss": (outputs[:, 0] - labels).square().mean(), "logits": outputs}


def metrics_of(predicted: Any) -> dict[str, float]:
    """Of all ranks' rows."""
    errors = predicted.predictions[:, 0] - predicted.label_ids
    return {"mean_square": float((errors**2).mean()), "rows": len(errors)}


def main() -> None:
    """Train, save on the way, evaluate."""
    options = parse()
    place = "dearmpi.integrations.transformers" if options.explicit else "transformers"
    args = import_module(place).TrainingArguments(
        output_dir=options.folder,
        per_device_train_batch_size=BATCH // options.processes,
        per_device_eval_batch_size=BATCH // options.processes,
        num_train_epochs=EPOCHS,
        learning_rate=0.01,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        max_grad_norm=0.5,
        gradient_accumulation_steps=2,
        logging_steps=1,
        save_strategy="steps",
        save_steps=SAVE_STEPS,
        eval_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=Net(),
        args=args,
        train_dataset=Rows(),
        eval_dataset=Rows(24),
        compute_metrics=metrics_of,
    )
    trainer.train(resume_from_checkpoint=options.resume)
    more = trainer.evaluate(Rows(21))
    assert more["eval_rows"] == 21 and args.world_size == options.processes
    trainer.save_model(f"{options.folder}/final")
    if args.process_index == 0:
        wanted = ("grad_norm", "learning_rate", "eval_loss", "eval_mean_square")
        entries = [entry for entry in trainer.state.log_history if entry["step"] > SAVE_STEPS]
        history = [entry[k] for entry in entries for k in wanted if k in entry]
        model = trainer.accelerator.unwrap_model(trainer.model).state_dict()
        seen = [*history[:-2], more["eval_mean_square"]]
        torch.save({"model": model, "seen": seen}, options.out)


if __name__ == "__main__":
    main()
