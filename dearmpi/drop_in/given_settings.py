"""Choices: what a user may say of the engine, before the script begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dearmpi.config import CommDtype, Gather, ScheduleName


@dataclass(frozen=True, slots=True)
class Choices:
    """Settings of ``EngineConfig`` for every model that is wrapped from now on."""

    schedule: ScheduleName = "dear"
    gather: Gather = "gradients"
    comm_dtype: CommDtype = "fp32"


class Chosen:
    """What holds in this process."""

    choices: ClassVar[Choices] = Choices()
