"""TensorBoard: the metrics once more, as events that TensorBoard shows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dearmpi.errors import ConfigError


class TensorBoard:
    """Writes scalars to ``tensorboard/`` in the run folder.

    resume_step: events of later steps, from before the run was resumed, are hidden.
    Raises ConfigError where TensorBoard is not installed.
    """

    def __init__(self, run_folder: Path, resume_step: int | None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"TensorBoard is not installed ({error}); run: pip install 'dearmpi[tensorboard]'"
            ) from error
        purge_step = None if resume_step is None else resume_step + 1
        folder = str(run_folder / "tensorboard")
        self._writer: Any = SummaryWriter(folder, purge_step=purge_step)

    def write(self, step: int, values: Mapping[str, float | int | None]) -> None:
        """Write each value but the step itself and those that were not measured."""
        for name, value in values.items():
            if name != "step" and value is not None:
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
