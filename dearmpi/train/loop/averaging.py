"""Averaging: an exponential moving average of the parameters, which evaluations use."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dearmpi.train.run.resuming import PREFIX
from dearmpi.train.tasks.own_code import explained

_NAME = f"{PREFIX}@ema/"  # no state of a script has such a name


class Average:
    """The average over the steps of ``model``'s parameters, and its buffers as they are now.

    It follows a step when the parameters are current anyway: after the feed-forward of the next
    step. So it waits for no gather.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """decay: what a step keeps of the average before. Raises TaskError for a model that cannot
        be copied.
        """
        self._model, self._is_behind = model, False
        with explained("ema needs a copy of the model, which cannot be made"):
            self._averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
        self._averaged.requires_grad_(False)

    @property
    def model(self) -> nn.Module:
        """A model with the average as its parameters."""
        module: nn.Module = self._averaged.module
        return module

    def note_step(self) -> None:
        """A step was taken; its parameters are not read yet."""
        self._is_behind = True

    def catch_up(self) -> None:
        """Take the last step into the average; reads the parameters."""
        if self._is_behind:
            self._averaged.update_parameters(self._model)
            self._is_behind = False

    @torch.no_grad()
    def refresh(self) -> None:
        """Follow parameters and buffers, which are current and the same on all ranks."""
        self.catch_up()
        for own, current in zip(self.model.buffers(), self._model.buffers(), strict=True):
            own.copy_(current)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of it."""
        state = self._averaged.state_dict()
        return {_NAME + name: tensor for name, tensor in state.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from the ``tensors`` of a checkpoint."""
        state = {name.removeprefix(_NAME): tensor for name, tensor in tensors.items()}
        self._averaged.load_state_dict(state)
