"""Inner state: what each rank's inner optimizer has learned, averaged over ranks at a merge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dearmpi.comm.world import World

InnerState = Literal["keep", "average"]


class StateAverage:
    """Averages the floating-point state of inner optimizers, such as momentum.

    It travels whole, in fp32 at least, and all ranks wait for it. State that some rank lacks, as of
    a parameter without gradients there, stays each rank's own.
    """

    def __init__(self, world: World) -> None:
        """Collective."""
        self._world = world
        self._channel = world.open_channel("inner state", window=1)

    @torch.no_grad()
    def merge(
        self, params: Mapping[str, nn.Parameter], state: Mapping[Tensor, Mapping[str, Any]]
    ) -> None:
        """Replace the ``state`` of ``params``, by name, by its mean over ranks (collective)."""
        tensors = {
            f"{name} {key} {value.numel()}": value
            for name, param in params.items()
            for key, value in state.get(param, {}).items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }
        of_ranks = [
            set(text.splitlines()) for text in self._world.all_gather_text("\n".join(tensors))
        ]
        common = [tensors[label] for label in tensors if all(label in own for own in of_ranks)]
        if not common:
            return
        is_double = any(value.dtype == torch.float64 for value in common)
        dtype = torch.float64 if is_double else torch.float32
        flat = torch.cat([value.reshape(-1).to("cpu", dtype) for value in common])
        self._add_up(flat)
        means = flat.div_(self._world.size).split([value.numel() for value in common])
        for value, mean in zip(common, means, strict=True):
            value.copy_(mean.view(value.shape))

    def close(self) -> None:
        """Give the channel back (collective)."""
        self._channel.close()

    def _add_up(self, flat: Tensor) -> None:
        has_arrived = False

        def finish() -> None:
            nonlocal has_arrived
            has_arrived = True

        what = "the inner optimizers' state"
        self._channel.submit(what, lambda c: c.start_all_reduce(flat, "sum"), finish)
        self._world.progress.wait_until(lambda: has_arrived, what=what)
