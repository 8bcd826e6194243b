"""Simulated iterations of the paper's models: the default settings, WFBP, and the planner's plan.

    python benchmarks/planned.py [--world-size 4] [--gigabits 1] [--split-mb 4] [--tokens 64]
        [--main-thread-ms 0.1]

Communication over computation is 0.5, 1 and 2; backprop takes twice as long as feed-forward. Times
are over ``max(compute, communication)``, communication being both ways of all bytes on the wire.
``bound`` is what no plan can beat, ``late`` what none can whose gathers all follow the backprop, as
DeAR's do; in brackets that over DeAR's own bound, ``max(backprop, reduce-scatters) +
max(feed-forward, all-gathers)``. Two columns are plans of what the engine cannot do: ``split`` has
the model's large tensors cut up; ``rows`` has a tied embedding's gradient from the decoder reduced
as soon as that is there, at the end of backprop no more than the rows that the batch looked up, and
before the feed-forward no more than those that the next batch needs, of ``--tokens`` for each
sample. ``finer`` is how much longer (or, below zero, less long) an iteration in DeAR's order with
the default buckets would take with one for each tensor, if nothing took time but bytes: below zero
it is the most that finer reduce-scatters and all-gathers could gain.
"""

from __future__ import annotations

import argparse
import time
import timeit
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace

from dearmpi.config import EngineConfig, ScheduleName
from dearmpi.plan.data.layout import ParamSpec, build_layout, fuse_by_cap
from dearmpi.plan.data.plan import Plan
from dearmpi.plan.data.schedule import Conduct, build_schedule
from dearmpi.plan.data.workload import Workload, read_workload, workload_names
from dearmpi.plan.model.cost import Costs, ring_cost
from dearmpi.plan.model.profile import ModelProfile, profile_workload
from dearmpi.plan.search.planner import make_plan
from dearmpi.plan.search.problem import least_iteration_s
from dearmpi.plan.simulate.timeline import simulate

ALPHA_S = 0.5e-3  # of a collective over 4 hosts, and in proportion over more
COLUMNS = ("bound", "late", "dear", "wfbp", "plan", "split", "rows", "finer")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--gigabits", type=float, default=1.0)
    parser.add_argument("--split-mb", type=float, default=4.0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--main-thread-ms", type=float, default=0.1, help="for each bucket")
    given = parser.parse_args()
    costs = assumed_costs(given.world_size, given.gigabits)
    costs = replace(costs, main_thread_s=given.main_thread_ms / 1e3)
    head = "  ".join(f"{name:>{14 if name == 'late' else 6}}" for name in COLUMNS)
    print(f"{'workload':<13} ratio  {head}  plan")
    for name in workload_names():
        workload = read_workload(name)
        others = (
            split(workload, int(given.split_mb * 1e6)),
            untie(workload, given.tokens * workload.batch_size),
        )
        for ratio in (0.5, 1.0, 2.0):
            print(f"{name:<13} {ratio:5}  {row(workload, others, costs, ratio=ratio)}", flush=True)
    for world_size in (4, 4096):
        print(simulation_cost(costs.at(world_size)))


def simulation_cost(costs: Costs) -> str:
    """What it takes to simulate one iteration of BERT-Large with a bucket per tensor."""
    profile = timed(read_workload("bert_large"), costs, ratio=1.0)
    layout = build_layout([[spec] for spec in profile.workload.params()], costs.world_size)
    made = Conduct(build_schedule("dear", len(layout)), window=2, eager=True)

    def run() -> None:
        simulate(profile, layout, made, costs)

    seconds = min(timeit.repeat(run, number=1, repeat=5))
    tracemalloc.start()
    run()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (
        f"simulating bert_large, {len(layout)} buckets, {costs.world_size} ranks: "
        f"{seconds * 1e3:.0f} ms, {peak_bytes / 1e6:.1f} MB"
    )


def row(workload: Workload, others: Sequence[Workload], costs: Costs, *, ratio: float) -> str:
    """One line: times relative to the larger of computation and communication.

    others: the same model with other tensors; they take as long to compute.
    """
    profile = timed(workload, costs, ratio=ratio)
    also = [replace(profile, workload=other) for other in others]
    start = time.process_time()
    plan = planned(profile, costs)
    took = time.process_time() - start
    late_s = least_iteration_s(profile, costs, eager=False)
    times = (
        plan.prediction.bound_s,
        late_s,
        by_default(profile, costs),
        by_default(profile, costs, schedule="wfbp"),
        plan.prediction.iteration_s,
        *(planned(other, costs).prediction.iteration_s for other in also),
    )
    communication_s = communication_of(workload, costs)
    bound_s = max(profile.feed_forward_s + profile.backprop_s, communication_s)
    cells = [f"{seconds / bound_s:6.3f}" for seconds in times]
    half_s = communication_s / 2
    own_s = max(profile.backprop_s, half_s) + max(profile.feed_forward_s, half_s)
    cells[1] += f" ({late_s / own_s:.3f})"
    cells.append(f"{finer(profile, costs):+6.2%}")
    made = f"{len(plan.buckets)} buckets, window {plan.window}, {took:.1f} s to find"
    return f"{'  '.join(cells)}  {made}"


def finer(profile: ModelProfile, costs: Costs) -> float:
    """What a bucket for each tensor adds to an iteration, as a share of it, where it is free."""
    free = replace(
        costs,
        reduce_scatter=costs.reduce_scatter.scaled(alpha=0, beta=1),
        all_gather=costs.all_gather.scaled(alpha=0, beta=1),
        update_s=0.0,
        main_thread_s=0.0,
    )
    return by_default(profile, free, cap_bytes=1) / by_default(profile, free) - 1


def split(workload: Workload, most_bytes: int) -> Workload:
    """``workload`` with its tensors cut into pieces of ``most_bytes`` at most."""
    return workload.cut({spec.name: cut(spec, most_bytes) for spec in workload.params()})


def untie(workload: Workload, rows: int) -> Workload:
    """``workload`` whose decoder has its own table, and whose embedding has ``rows`` rows only."""
    ties = {name for layer in workload.layers for name in layer.uses}
    tables = {spec.name: spec for spec in workload.params() if spec.name in ties}
    layers = []
    for layer in workload.layers:
        looked_up = [
            replace(spec, shape=(rows, *spec.shape[1:])) if spec.name in tables else spec
            for spec in layer.params
        ]
        own = [replace(tables[name], name=f"{layer.name} {name}") for name in layer.uses]
        layers.append(replace(layer, params=(*looked_up, *own), uses=()))
    return replace(workload, layers=tuple(layers))


def cut(spec: ParamSpec, most_bytes: int) -> list[ParamSpec]:
    """``spec`` in equal pieces."""
    count = -(-spec.nbytes // most_bytes)
    bounds = [spec.numel * number // count for number in range(count + 1)]
    return [
        replace(spec, name=f"{spec.name}[{start}:{stop}]", shape=(stop - start,))
        for start, stop in zip(bounds, bounds[1:], strict=False)
    ]


def assumed_costs(world_size: int, gigabits: float) -> Costs:
    """A ring over links of so many Gbit/s, and updates of a millisecond."""
    link = ring_cost(ALPHA_S / 3, 8e-9 / gigabits, world_size)
    return Costs(world_size, link, link, update_s=1e-3, main_thread_s=1e-4)


def communication_of(workload: Workload, costs: Costs) -> float:
    """Seconds that all bytes need on the wire, both ways."""
    nbytes = sum(spec.nbytes for spec in workload.params())
    return costs.reduce_scatter.wire_s(nbytes) + costs.all_gather.wire_s(nbytes)


def timed(workload: Workload, costs: Costs, *, ratio: float) -> ModelProfile:
    """``workload`` with ``ratio`` times as much communication as computation."""
    compute_s = communication_of(workload, costs) / ratio
    return profile_workload(workload, feed_forward_s=compute_s / 3, backprop_s=compute_s * 2 / 3)


def by_default(
    profile: ModelProfile,
    costs: Costs,
    *,
    schedule: ScheduleName = "dear",
    cap_bytes: int | None = None,
) -> float:
    """Seconds of an iteration with the engine's default settings, but for eager updates.

    cap_bytes: about so many bytes a bucket, if not the default.
    """
    config = EngineConfig(schedule=schedule)
    specs = list(profile.workload.params())
    model_bytes = sum(spec.nbytes for spec in specs)
    cap_bytes = cap_bytes or config.cap_bytes(model_bytes, world_size=costs.world_size)
    layout = build_layout(fuse_by_cap(specs, cap_bytes), costs.world_size)
    made = Conduct(build_schedule(schedule, len(layout)), config.window, eager=True)
    return simulate(profile, layout, made, costs).iteration_s


def planned(profile: ModelProfile, costs: Costs) -> Plan:
    """The planner's plan, with eager updates."""
    return make_plan(profile, costs, world_size=costs.world_size, eager=True)


if __name__ == "__main__":
    main()
