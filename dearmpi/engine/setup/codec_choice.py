"""CodecChoice: ``compress="auto"``: what large buckets travel as, by a job's first iterations.

They travel dense at first. Then rank 0 simulates an iteration with each way that any optimizer
bears. It knows the layers' times, the link and what codecs compute, all measured in the job.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from dearmpi.config import Compress, EngineConfig
from dearmpi.device.accelerator import device_of
from dearmpi.engine.codec.timing import measure_codec
from dearmpi.engine.iteration.compilation import refuse_compiled
from dearmpi.engine.setup.self_planning import NUM_PROFILED, NUM_WARMUP, JobMeasurement
from dearmpi.engine.setup.spec import EngineSpec
from dearmpi.errors import ConfigError, UsageError
from dearmpi.plan.model.codec_cost import CodecCost
from dearmpi.plan.model.cost import Costs
from dearmpi.tune.plan_process import plan_in_use

_LEAST_GAIN = 0.03  # below, the machine's noise would choose
_QUANTIZED: tuple[Compress, ...] = ("int8", "int4")
_DENSE = "fp32"
_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    _DENSE: {"compress": "none"},
    "bf16": {"compress": "none", "comm_dtype": "bf16"},
    **{name: {"compress": name} for name in _QUANTIZED},
}


def undecided(config: EngineConfig) -> bool:
    """Whether the job is to find out what its buckets travel as."""
    return config.compress == "auto"


def until_decided(config: EngineConfig) -> EngineConfig:
    """``config`` as long as buckets travel dense."""
    return replace(config, **_SETTINGS[_DENSE]) if undecided(config) else config


def check_choosable(config: EngineConfig, model: nn.Module) -> None:
    """Raise ConfigError for a compiled ``model`` that ``config`` wants to be timed."""
    if undecided(config):
        refuse_compiled(model, "compress")


def warn_of_bias(config: EngineConfig) -> None:
    """Warn where what is sent of gradients has another mean than these, and nothing else is."""
    if config.is_biased:
        share = 1.0 - (config.sent_density or 0.0)
        warnings.warn(
            f"compress {config.compress!r} with error_feedback 'none' drops {100 * share:g} % of "
            "each gradient for good, so training may not reach the optimum; leave error_feedback "
            "out, or take 'random-k', whose mean is that of the gradient",
            stacklevel=5,
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """settings: what is taken, as fields of ``EngineConfig``; reason: a line on it, for people."""

    settings: Mapping[str, Any]
    reason: str

    @property
    def is_dense(self) -> bool:
        """Whether all stays as it is."""
        return self.settings == _SETTINGS[_DENSE]


def stay_dense(why: str) -> Decision:
    """All stays as it is, for want of anything else."""
    return Decision(_SETTINGS[_DENSE], f"compress auto sends {_DENSE} as it is: {why}")


class CodecChoice:
    """From the first step to the decision; made on all ranks together, with nothing under way."""

    def __init__(self, in_use: EngineSpec, measurement: JobMeasurement) -> None:
        """``in_use``: what the first iterations follow."""
        self._in_use, self._measurement = in_use, measurement
        self._world = in_use.context.world
        self._num_steps = 0

    def stepped(self) -> Decision | None:
        """A step was taken; the decision, once it is due (collective then)."""
        self._num_steps += 1
        if self._num_steps < NUM_WARMUP + NUM_PROFILED:
            return None
        micro_batches = max(1, self._measurement.num_passes // self._num_steps)
        try:
            predicted = self._predict(micro_batches)
        except (UsageError, ConfigError) as error:
            return stay_dense(str(error))
        finally:
            self.abandon()
        text = self._world.broadcast_text(decide(predicted) if self._world.is_root else "")
        name, _, reason = text.partition("\n")
        return Decision(_SETTINGS[name], reason)

    def abandon(self) -> None:
        """Leave the model as it was."""
        self._measurement.detach()

    def _predict(self, micro_batches: int) -> dict[str, float]:
        """Seconds of an iteration by what buckets travel as (collective)."""
        profile, costs, _ = self._measurement.measure(micro_batches=micro_batches)
        layout, conduct = self._in_use.layout, self._in_use.conduct
        predicted = {}
        for name, known in self._ways(costs).items():
            plan = plan_in_use(profile, known, layout, conduct)
            if plan is None:
                raise UsageError(
                    "layers were frozen or thawed in the first steps", code="rank-cannot-plan"
                )
            predicted[name] = plan.over(micro_batches).prediction.iteration_s
        return predicted

    def _ways(self, costs: Costs) -> dict[str, Costs]:
        """What each way that can be taken costs (collective)."""
        layout, params = self._in_use.layout, self._in_use.names
        specs = [placed.spec for bucket in layout for placed in bucket.placements]
        ways = {_DENSE: costs}
        is_plain = not any(param.is_complex() for param in params)
        if is_plain and any(spec.trained and spec.itemsize > 2 for spec in specs):
            ways["bf16"] = costs.sent_as("bf16", specs)
        wide = [one for one in layout if one.trained and one.dtype in ("float32", "float64")]
        applies = any(CodecCost.applies(bucket.padded_numel) for bucket in wide)
        if applies and device_of(params) is None:
            for name in _QUANTIZED:
                cost = measure_codec(self._world, EngineConfig(compress=name))
                ways[name] = replace(costs, codec=cost)
        return ways


def decide(predicted: Mapping[str, float]) -> str:
    """What is taken of the seconds ``predicted``, what loses least first; and behind it a line that
    says why.

    Each gives way to a later one that saves 3 %.
    """
    taken = _DENSE
    for name, seconds in predicted.items():
        if seconds <= (1 - _LEAST_GAIN) * predicted[taken]:
            taken = name
    figures = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in predicted.items())
    line = f"compress auto takes {taken}"
    if taken == _DENSE:
        line = f"compress auto sends {_DENSE} as it is, since nothing saves {_LEAST_GAIN:.0%}"
    return f"{taken}\n{line}; an iteration is predicted to take: {figures}"
