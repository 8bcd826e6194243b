"""Small models whose iterations can be worked out by hand: a second for each step."""

from __future__ import annotations

from dearmpi.config import Gather
from dearmpi.plan.data.layout import BucketLayout, build_layout
from dearmpi.plan.data.schedule import AllGather, Conduct, Launch, Schedule, Wait
from dearmpi.plan.data.workload import LayerSpec, Workload, float_layer
from dearmpi.plan.model.cost import Costs, LinkModel
from dearmpi.plan.model.profile import LayerTimes, ModelProfile
from dearmpi.plan.simulate.timeline import Timeline, simulate

UNIT = LinkModel(0.0, 1 / 8)  # 8 bytes, two elements of fp32, take a second
COSTS = Costs(2, UNIT, UNIT)


def make_profile(
    *layers: LayerSpec, feed_forward_s: float = 1.0, backprop_s: float = 1.0
) -> ModelProfile:
    workload = Workload("small", "", layers, batch_size=1, unit="img")
    return ModelProfile(workload, (LayerTimes(feed_forward_s, backprop_s),) * len(layers))


def equal(num_layers: int, **times: float) -> ModelProfile:
    """Layers of two elements each; a second for each of a layer's passes."""
    layers = [float_layer(f"{i}", {"w": (2,)}, 1) for i in range(num_layers)]
    return make_profile(*layers, **times)


def per_tensor(profile: ModelProfile, world_size: int = 2) -> BucketLayout:
    return build_layout([[spec] for spec in profile.workload.params()], world_size)


def run(
    profile: ModelProfile,
    schedule: Schedule,
    *,
    costs: Costs = COSTS,
    eager: bool = True,
    window: int = 1,
    gather: Gather = "parameters",
) -> Timeline:
    layout = per_tensor(profile, costs.world_size)
    return simulate(profile, layout, Conduct(schedule, window, eager, gather), costs)


def own(*gathers: tuple[int, int]) -> Schedule:
    buckets = tuple(reversed(range(len(gathers))))
    pairs = tuple(AllGather(bucket, after) for bucket, after in gathers)
    return Schedule("own", buckets, pairs, Launch.GRADIENTS_READY, Wait.FEED_FORWARD)
