"""Before: transformers' Trainer. torchrun --nproc-per-node 2 transformers_before.py 2"""

import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Sums(Dataset):
    """Sequences in which each token is the sum of the two before it."""

    def __init__(self, count: int) -> None:
        tokens = torch.randint(16, (count, 12), generator=torch.Generator().manual_seed(1))
        for place in range(2, 12):
            tokens[:, place] = (tokens[:, place - 1] + tokens[:, place - 2]) % 16
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[number], "labels": self.tokens[number]}


def main(folder: str, ranks: int) -> None:
    args = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=8 // ranks,
        per_device_eval_batch_size=8 // ranks,
        gradient_accumulation_steps=2,
        max_steps=12,
        learning_rate=0.01,
        lr_scheduler_type="cosine",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 12, "vocab_size": 16}
    options = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **options, **ends)).double()
    trainer = Trainer(model=model, args=args, train_dataset=Sums(192), eval_dataset=Sums(32))
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"loss {loss:.8f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(name, int(sys.argv[1]))
