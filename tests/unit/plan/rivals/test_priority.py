"""Priority: partitions of tensors, and the order in which they reach the network."""

from __future__ import annotations

from dearmpi.plan.data.layout import ParamSpec
from dearmpi.plan.data.workload import Workload, float_layer
from dearmpi.plan.model.cost import LinkModel
from dearmpi.plan.model.profile import profile_workload
from dearmpi.plan.rivals.merging import ReadyGradient, partition, prioritise

LINK = LinkModel(1.0, 0.0)
NAMES = ["p0", "p1", "p2", "p3"]


def order(*pairs: tuple[str, float], credit: int) -> str:
    gradients = [
        ReadyGradient(ParamSpec(name, (10,), itemsize=1), ready_s) for name, ready_s in pairs
    ]
    specs = prioritise(gradients, NAMES, LINK, credit_numel=credit)
    return " ".join(spec.name for spec in specs)


def test_tensors_are_cut_and_nothing_is_lost() -> None:
    layers = (
        float_layer("embed", {"weight": (5, 2)}, 1),
        float_layer("head", {"bias": (4,)}, 1, uses=("embed.weight",)),
    )
    workload = Workload("tied", "", layers, batch_size=1, unit="img")
    profile = profile_workload(workload, feed_forward_s=1, backprop_s=2)
    cut = partition(profile, most_numel=4)
    pieces = [(spec.name, spec.shape) for spec in cut.workload.params()]
    assert pieces == [
        ("embed.weight[0:4]", (4,)),
        ("embed.weight[4:8]", (4,)),
        ("embed.weight[8:10]", (2,)),
        ("head.bias", (4,)),
    ]
    assert cut.workload.layers[1].uses == tuple(name for name, _ in pieces[:3])
    assert cut.times == profile.times


def test_the_first_layers_overtake_what_waits() -> None:
    # p3 is on its way until 1; by then p2 and p1 wait, and p0 comes at 1.5.
    ready = (("p3", 0.0), ("p2", 0.5), ("p1", 0.8), ("p0", 1.5))
    assert order(*ready, credit=1) == "p3 p1 p0 p2"


def test_what_is_handed_over_is_not_overtaken() -> None:
    # With credit for two, p2 is handed over at once, and p1 when p3 is done.
    ready = (("p3", 0.0), ("p2", 0.5), ("p1", 0.8), ("p0", 1.5))
    assert order(*ready, credit=11) == "p3 p2 p1 p0"
    assert order(*ready, credit=99) == "p3 p2 p1 p0"


def test_an_idle_network_takes_what_there_is() -> None:
    assert order(("p3", 0.0), ("p0", 5.0), ("p2", 9.0), credit=1) == "p3 p0 p2"
