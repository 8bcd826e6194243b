"""Prediction: what an iteration is simulated to take."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dearmpi.plan.data.fields import Fields


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of an iteration, and of its parts by themselves, as simulated.

    bound_s: what no plan can be faster than.
    """

    iteration_s: float
    compute_s: float
    communication_s: float
    bound_s: float

    @staticmethod
    def from_fields(data: Fields) -> Prediction:
        """As ``dataclasses.asdict`` gives it. Raises ConfigError for what is missing or wrong."""
        return Prediction(
            iteration_s=data.number("iteration_s"),
            compute_s=data.number("compute_s"),
            communication_s=data.number("communication_s"),
            bound_s=data.number("bound_s"),
        )

    def over(self, micro_batches: int) -> Prediction:
        """The same with gradients accumulated over ``micro_batches``, where this is of one.

        Nothing travels between the feed-forward of the first and the backprop of the last, so the
        computation of all others is added as it is.
        """
        early_s = (micro_batches - 1) * self.compute_s
        return replace(
            self,
            iteration_s=self.iteration_s + early_s,
            compute_s=self.compute_s + early_s,
            bound_s=self.bound_s + early_s,
        )
