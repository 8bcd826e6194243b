"""Synonym: what other tools call a setting, for people who come from them."""

from __future__ import annotations

from collections.abc import Mapping

# Not what counts otherwise there, such as a batch size per device. Names that are alike but for a
# letter or two are found without.
_OTHERS: Mapping[str, str] = {
    "data": "data_dir data_path dataset train_data",
    "workers": "num_workers dataloader_num_workers",
    "epochs": "num_epochs num_train_epochs max_epochs n_epochs",
    "max_steps": "max_iters num_iters num_steps max_train_steps total_steps",
    "batch_size": "global_batch_size train_batch_size bs",
    "gradient_accumulation_steps": "accumulate_grad_batches accumulation_steps grad_accum",
    "optimizer": "opt optim",
    "lr": "learning_rate base_lr",
    "weight_decay": "wd",
    "max_grad_norm": "clip_grad clip_grad_norm gradient_clip_val gradient_clipping",
    "lr_schedule": "lr_scheduler lr_scheduler_type scheduler sched",
    "precision": "amp bf16 fp16 mixed_precision dtype",
    "threads": "num_threads",
    "run_folder": "output_dir out_dir save_dir",
    "name": "run_name exp_name experiment_name job_name",
    "resume": "resume_from resume_from_checkpoint",
    "checkpoint_interval": "save_interval save_steps checkpoint_every",
    "keep": "save_total_limit keep_checkpoints",
    "log_interval": "logging_steps log_every log_freq print_freq",
    "eval_interval": "eval_steps eval_every",
}
SYNONYMS = {other: ours for ours, others in _OTHERS.items() for other in others.split()}


def our_name(name: str) -> str | None:
    """What the setting ``name``, as a flag, a variable or a key has it, is called here, if that is
    known.
    """
    return SYNONYMS.get(name.lstrip("-").replace("-", "_").lower())
