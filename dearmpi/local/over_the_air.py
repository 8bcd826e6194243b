"""Over-the-air aggregation, in simulation: clients send at once, and a radio channel adds them up.

No radio is driven: fading and noise are drawn from a seed. Each client inverts its own channel, so
that signals arrive aligned and equally strong; clients in a deep fade stay silent.
Source: the overview arXiv 2112.05559 of edge learning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dearmpi.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SimulatedAirSum:
    """An unbiased estimate of a mean, from one transmission of all clients at once (simulated).

    threshold: least channel gain |h|^2, of mean 1, at which a client sends. noise_std: of the
    receiver, relative to a signal that was scaled to root mean square 1.

    Raises ConfigError for numbers out of range.
    """

    threshold: float = 0.1
    noise_std: float = 0.1

    def __post_init__(self) -> None:
        for name, value in (("threshold", self.threshold), ("noise_std", self.noise_std)):
            if not 0 <= value < math.inf:
                raise ConfigError(
                    f"{name} is {value}; it must be 0 or more, and finite", code="out-of-range"
                )

    @property
    def chance(self) -> float:
        """That a client sends: the gain of a Rayleigh channel is exponentially distributed."""
        return math.exp(-self.threshold)

    def mean(self, values: Tensor, generator: torch.Generator) -> Tensor:
        """The estimate of ``values.mean(0)``. values: (clients, size), real."""
        count, size = values.shape
        gain = torch.empty(count, dtype=torch.float64).exponential_(generator=generator)
        sends = (gain >= self.threshold).to(values.dtype)
        noise = torch.randn(size, generator=generator, dtype=torch.float64).to(values.dtype)
        scale = _scale(values)
        heard = (sends[:, None] * values).sum(0) + self.noise_std * scale * noise
        return heard / (count * self.chance)

    def variance(self, values: Tensor) -> float:
        """Of the estimate: the expected squared distance to the mean, over all coordinates."""
        count, size = values.shape
        silence = (1 - self.chance) / self.chance * float(values.square().sum())
        noise = size * (self.noise_std * float(_scale(values)) / self.chance) ** 2
        return (silence + noise) / count**2


def _scale(values: Tensor) -> Tensor:
    return values.square().mean().sqrt()
