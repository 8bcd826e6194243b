"""Visible GPUs: how many of its host's a rank can use, and where it can use none, why."""

from __future__ import annotations

import os
from dataclasses import dataclass
from glob import glob

import torch

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICE_FILES = "/dev/nvidia[0-9]*"
_VERSION_LINE = "nvidia-smi: CUDA Version"
_FITTING_BUILD = "install a build of torch for a CUDA that the driver there can run"


@dataclass(frozen=True, slots=True)
class VisibleGpus:
    """One rank's view.

    num_usable: those that torch can use. num_counted: those that it counts, which needs no driver
    that it could use. num_shown: those that the host shows by their files, also to a torch that
    cannot look for any. reason: why none can be used, and cure: what to do; else empty.
    """

    num_usable: int
    num_counted: int = 0
    num_shown: int = 0
    reason: str = ""
    cure: str = ""

    @property
    def is_broken(self) -> bool:
        """Whether the rank was given GPUs that torch cannot use."""
        return self.num_counted > self.num_usable

    def describe(self) -> str:
        """What a rank without a usable one would say of itself."""
        number = max(self.num_counted, self.num_shown)
        if not number:
            return f"sees no CUDA device ({self.reason})"
        gpus = "the only GPU" if number == 1 else f"any of the {number} GPUs"
        return f"cannot use {gpus} of its host ({self.reason})"


def look_for_gpus() -> VisibleGpus:
    """Those of this host, as this process sees them."""
    counted, shown = torch.cuda.device_count(), len(glob(_DEVICE_FILES))
    if counted and torch.cuda.is_available():
        return VisibleGpus(counted, counted, shown)
    reason, cure = _explain(counted, shown)
    return VisibleGpus(0, counted, shown, reason, cure)


def _explain(counted: int, shown: int) -> tuple[str, str]:
    """Why none of those that torch counts, or the host shows, can be used, and what to do."""
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"torch {torch.__version__} is built without CUDA",
            f"install torch's build for CUDA there, no newer than the driver ({_VERSION_LINE})",
        )
    if counted:
        return (
            f"torch {torch.__version__}: {_failure()}",
            f"{_FITTING_BUILD} ({_VERSION_LINE})",
        )
    value = os.environ.get(VISIBLE)
    reason = f"{VISIBLE} is {'not set' if value is None else repr(value)}"
    cure = f"see nvidia-smi and {VISIBLE} there, ask the cluster for GPUs (SLURM: --gpus-per-node)"
    if shown and value != "":
        # Where NVML fails torch counts none that CUDA cannot use: the driver may be the cause too.
        reason += f"; torch {torch.__version__}: {_failure()}"
        cure += f", or {_FITTING_BUILD}"
    return reason, cure


def _failure() -> str:
    """What torch says where there are devices and it can use none."""
    try:
        torch.cuda.init()
    except Exception as error:  # RuntimeError, or what a broken build raises
        return next(iter(str(error).splitlines()), type(error).__name__)
    return "torch.cuda.is_available() is False"
