"""TrainingArguments: transformers', under mpirun."""

from __future__ import annotations

from dataclasses import dataclass

from dearmpi.integrations.serve import import_framework, refuse, serve

_transformers = import_framework("transformers", '"transformers[torch]"')


@dataclass
class TrainingArguments(_transformers.TrainingArguments):  # type: ignore[misc,name-defined]
    """transformers', with which a Trainer trains by dearmpi.

    The Trainer saves the optimizer's state on rank 0 alone, so every rank has it whole. For other
    classes of arguments call ``dearmpi.integrations.serve`` before.
    """

    def __post_init__(self) -> None:
        """Serve, before the base class starts torch.distributed (collective).

        Raises ConfigError for DeepSpeed and FSDP.
        """
        for name in ("deepspeed", "fsdp"):
            refuse(getattr(self, name, None), name)
        serve()
        super().__post_init__()
