"""How far are simulated iterations from measured ones?

Usage, on emulated hosts (bin/netlab up 4 1gbit):

    bin/netlab run 4 python benchmarks/prediction.py measure --workload resnet50 --json FILE
    python benchmarks/prediction.py sum FILE...

The first calibrates the link and profiles a few iterations of a replayed workload, simulates each
method from that alone, and measures all of them in the same job. The second sums up: median and
worst error. An error is predicted over measured time, less one.

The profile is of fp32, ring reduce-scatters and eager updates. What is sent in half precision is
predicted from it; methods with other reduce-scatters or without eager updates are refused.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.all_reduce_cost import NUM_IN_FLIGHT, calibrate_all_reduce
from dearmpi import DistributedOptimizer, connect
from dearmpi.bench.benchmark import BenchmarkSettings, make_workload_model
from dearmpi.bench.comparison import Length, compare_methods
from dearmpi.bench.method import Entrant, Method, Setup
from dearmpi.bench.own_methods import BAYES, read_config
from dearmpi.bench.workload_model import WorkloadModel
from dearmpi.comm.world import World
from dearmpi.engine.setup.self_planning import NUM_PROFILED, NUM_WARMUP, JobMeasurement
from dearmpi.plan.data.schedule import Conduct
from dearmpi.plan.model.cost import Costs, LinkModel
from dearmpi.plan.model.profile import ModelProfile
from dearmpi.plan.rivals import methods as simulated
from dearmpi.report.draw.units import align

METHODS = "serial,wfbp,dear,planned,ddp:8,ddp"
HEADER = ("method", "predicted s", "measured s", "error")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A method's iteration in seconds, as simulated and as measured."""

    method: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Above 0 where the simulation takes longer."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload on one cluster."""

    workload: str
    ratio: float
    hosts: int
    rate: str
    outcomes: tuple[Outcome, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    modes = parser.add_subparsers(required=True)
    one = modes.add_parser("measure")
    one.add_argument("--workload", default="resnet50")
    one.add_argument("--ratio", type=float, help="of a replayed workload; 1 unless given")
    one.add_argument("--methods", default=METHODS)
    one.add_argument("--rate", default="", help="of the links, as given to netlab; only printed")
    one.add_argument("--iterations", type=int, default=5)
    one.add_argument("--json", type=Path)
    one.set_defaults(run=measure)
    several = modes.add_parser("sum")
    several.add_argument("files", nargs="+", type=Path)
    several.set_defaults(run=sum_up)
    given = parser.parse_args()
    given.run(given)


def measure(given: argparse.Namespace) -> None:
    """Predict and measure (collective)."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # gloo warns of nameless addresses
    length = Length(num_warmup=3, num_batches=given.iterations, num_rounds=1)
    question = BenchmarkSettings(
        given.workload, given.methods.split(","), ratio=given.ratio, length=length
    )
    methods = question.read_methods()
    if any(method.label.partition(":")[0] == BAYES for method in methods):
        raise SystemExit("bayes cannot be predicted: its buckets follow from what is measured")
    unknown = [m.label for m in methods if not m.uses_group and not m.waits_in_mpi]
    if unknown:
        raise SystemExit(f"cannot predict {', '.join(unknown)}: only what runs over gloo or here")
    refuse_unlike_the_profile(methods)
    peers = {m.label: simulated.parse_method(m.label) for m in methods if m.uses_group}
    world = connect()
    tell = print if world.is_root else lambda _: None
    workload = make_workload_model(world, question, tell)
    profile, costs = profile_workload_model(world, workload)
    all_reduce = calibrate_all_reduce(world) if peers else LinkModel(0.0, 0.0)
    followed: dict[str, simulated.SimulationSetup] = {}
    watched = [watch(method, profile, costs, followed) for method in methods]
    result = compare_methods(world, workload, watched, length=length, tell=tell)
    outcomes = []
    for method, row in zip(methods, result.rows, strict=True):
        if row.error:
            raise SystemExit(f"{row.label} failed: {row.error}")
        if method.label in peers:
            predicted_s = predict_peer(peers[method.label], profile, costs, all_reduce)
        else:
            predicted_s = followed[method.label].run().iteration_s
        outcomes.append(Outcome(method.label, predicted_s, row.median_s))
    cell = Cell(given.workload, given.ratio or 1.0, result.hosts, given.rate, tuple(outcomes))
    tell("\n".join(describe(cell)))
    if given.json is not None and world.is_root:
        given.json.write_text(json.dumps(asdict(cell), indent=1) + "\n", encoding="utf-8")


def refuse_unlike_the_profile(methods: Sequence[Method]) -> None:
    """Exit for methods of this engine whose settings the profile tells nothing of."""
    for method in methods:
        if method.uses_group:
            continue
        config = read_config({"eager": "true", **method.options})
        if not config.eager or config.reduce_scatter != "ring":
            raise SystemExit(
                f"cannot predict {method.label}: the profile is of eager updates and ring "
                f"reduce-scatters, this has eager={str(config.eager).lower()} and "
                f"reduce_scatter={config.reduce_scatter}; leave those two out"
            )


def profile_workload_model(world: World, workload: WorkloadModel) -> tuple[ModelProfile, Costs]:
    """What ``plan="auto"`` measures in its first iterations (collective)."""
    model = workload.build()
    optimizer = DistributedOptimizer(
        workload.make_optimizer(model.parameters()), model, world=world, eager=True
    )
    measurement = JobMeasurement(
        optimizer._built.spec,
        codecs=optimizer._built.engine.codecs,
        waited=lambda: optimizer.waited_s,
    )
    loss = workload.losses()
    for _ in range(NUM_WARMUP + NUM_PROFILED):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    measured = measurement.measure()
    measurement.detach()
    optimizer.close()
    return measured.profile, measured.costs


def predict_peer(
    method: simulated.SimulatedMethod, profile: ModelProfile, costs: Costs, all_reduce: LinkModel
) -> float:
    """Seconds of an iteration of DDP over gloo, which updates everything at its end.

    Its buckets are charged what one of ours costs the main thread: the profile's backprop is that
    of our engine less as much for each of ours.
    """
    setup = method.prepare(profile, costs)
    over_gloo = replace(setup.costs, reduce_scatter=all_reduce, update_s=0.0, update_s_per_byte=0.0)
    conduct = replace(setup.conduct, window=NUM_IN_FLIGHT)
    setup = replace(setup, costs=over_gloo, conduct=conduct)
    nbytes = sum(spec.nbytes for spec in profile.workload.params())
    return setup.run().iteration_s + costs.update_s_per_byte * nbytes


def watch(
    method: Method,
    profile: ModelProfile,
    costs: Costs,
    followed: dict[str, simulated.SimulationSetup],
) -> Method:
    """``method``, which leaves in ``followed`` by which buckets and schedule our engine ran it."""

    def enter(setup: Setup) -> Entrant:
        entrant = method.enter(setup)
        optimizer = entrant.optimizer
        if not isinstance(optimizer, DistributedOptimizer):
            return entrant

        def finish() -> None:
            plan, config = optimizer.plan, optimizer.config
            window = plan.window if plan else config.window
            followed[method.label] = simulated.SimulationSetup(
                profile,
                optimizer.layout,
                Conduct(optimizer.schedule, window, eager=True, gather=config.gather),
                costs.sent_as(config.comm_dtype, profile.workload.params()),
            )
            entrant.finish()

        return replace(entrant, finish=finish)

    return replace(method, factory=enter)


def describe(cell: Cell) -> list[str]:
    """A line on the cell and a table."""
    rows = [
        (one.method, f"{one.predicted_s:.4f}", f"{one.measured_s:.4f}", f"{one.error:+.1%}")
        for one in cell.outcomes
    ]
    where = f"{cell.hosts} hosts" + (f" at {cell.rate}" if cell.rate else "")
    return ["", f"{cell.workload}, ratio {cell.ratio:g}, {where}", "", *align([HEADER, *rows])]


def sum_up(given: argparse.Namespace) -> None:
    """Print each cell's errors, and what they come to."""
    cells = [read_cell(path) for path in given.files]
    names = list(dict.fromkeys(one.method for cell in cells for one in cell.outcomes))
    rows = []
    for cell in cells:
        errors = {one.method: f"{one.error:+.1%}" for one in cell.outcomes}
        where = (cell.workload, f"{cell.ratio:g}", str(cell.hosts), cell.rate)
        rows.append((*where, *(errors.get(name, "-") for name in names)))
    print("\n".join(align([("workload", "ratio", "hosts", "rate", *names), *rows])))
    sizes = [abs(one.error) for cell in cells for one in cell.outcomes]
    print(f"{len(sizes)} predictions: median error {statistics.median(sizes):.1%}, ", end="")
    print(f"worst {max(sizes):.1%}")


def read_cell(path: Path) -> Cell:
    """What ``measure`` wrote."""
    plain = json.loads(path.read_text(encoding="utf-8"))
    outcomes = tuple(Outcome(**one) for one in plain.pop("outcomes"))
    return Cell(**plain, outcomes=outcomes)


if __name__ == "__main__":
    main()
