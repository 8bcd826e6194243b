"""Accelerator: accelerate's, under mpirun."""

from __future__ import annotations

from typing import Any

from dearmpi.config import CommDtype, Gather, ScheduleName
from dearmpi.integrations.serve import import_framework, refuse, serve

_accelerate = import_framework("accelerate", "accelerate")
_OTHER_WAYS = (
    "deepspeed_plugin",
    "deepspeed_plugins",
    "fsdp_plugin",
    "megatron_lm_plugin",
    "parallelism_config",
)


class Accelerator(_accelerate.Accelerator):  # type: ignore[misc,name-defined]
    """accelerate's, whose ``prepare`` wraps models for dearmpi."""

    def __init__(
        self,
        *args: Any,
        schedule: ScheduleName | None = None,
        gather: Gather | None = None,
        comm_dtype: CommDtype | None = None,
        **kwargs: Any,
    ) -> None:
        """Takes accelerate's arguments, and those of ``serve`` (collective).

        Raises ConfigError for plugins of DeepSpeed, FSDP and Megatron.
        """
        for name in _OTHER_WAYS:
            refuse(kwargs.get(name), name)
        serve(schedule=schedule, gather=gather, comm_dtype=comm_dtype)
        super().__init__(*args, **kwargs)
