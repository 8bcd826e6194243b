"""Master copies: fp32 values behind half-precision parameters, for the optimizer to work on."""

from __future__ import annotations

import torch
from torch import Tensor

MASTER = "master"  # the copy's name among the optimizer's state entries


class MasterCopy:
    """An fp32 copy of ``stored``. Small updates add up in it that half precision would lose.

    values: what the optimizer changes.
    """

    def __init__(self, stored: Tensor) -> None:
        self._stored = stored
        self.values = stored.float()

    def refresh(self) -> None:
        """Take over elements that somebody else has changed since, as loading a model does."""
        changed = self._stored != self.values.to(self._stored.dtype)
        self.values.copy_(torch.where(changed, self._stored.float(), self.values))

    def publish(self) -> None:
        """Round the values into the parameters."""
        self._stored.copy_(self.values)


def is_half(tensor: Tensor) -> bool:
    """Whether ``tensor`` is of a 16-bit floating-point type."""
    return tensor.dtype in (torch.float16, torch.bfloat16)
