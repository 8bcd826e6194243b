"""dear-train federate: algorithms for clients with unequal data, by numbers sent."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dearmpi.cli.endings import measure_together
from dearmpi.cli.flags import (
    OUT,
    Choice,
    check_apart,
    check_picture,
    check_place,
    picture_option,
    write,
    write_picture,
)
from dearmpi.config import nearest
from dearmpi.errors import ConfigError

if TYPE_CHECKING:
    from dearmpi.cli.console import Console
    from dearmpi.comm.world import World
    from dearmpi.local.federation import Algorithm, FederationSettings, Trajectory
    from dearmpi.report.draw.shape import Picture
    from dearmpi.train.tasks.logistic import LogisticProblem

_TASKS = ("breast-cancer", "digits")
_COLOURS = ("faint", "fourth", "third", "second", "first")
_MOST_POINTS = 400  # of a curve


@click.command(short_help="Minimise a mean over many clients.")
@click.option(
    "--task",
    type=Choice(_TASKS),
    default="breast-cancer",
    show_default=True,
    help="a logistic regression; digits are 0-4 against 5-9",
)
@click.option(
    "--algorithms",
    default="gd,fedavg,scaffnew,compressed-scaffnew,tamuna",
    show_default=True,
    metavar="LIST",
    help="what to run, one after the other",
)
@click.option("--clients", type=int, default=100, show_default=True, metavar="N", help="in all")
@click.option(
    "--cohort",
    type=int,
    metavar="C",
    help="clients in a round of fedavg and tamuna  [default: a tenth]",
)
@click.option(
    "--sparsity",
    type=int,
    default=2,
    show_default=True,
    metavar="S",
    help="clients that send a coordinate, of compressed-scaffnew and tamuna",
)
@click.option(
    "--p",
    type=float,
    metavar="P",
    help="chance that a local step ends its round  [default: the paper's]",
)
@click.option(
    "--condition",
    type=float,
    default=1000.0,
    show_default=True,
    metavar="KAPPA",
    help="L / mu, by the regularisation",
)
@click.option(
    "--split",
    type=Choice(("label", "shuffled")),
    default="label",
    show_default=True,
    help="samples dealt to clients sorted by class, or at random",
)
@click.option(
    "--target",
    type=float,
    default=1e-8,
    show_default=True,
    metavar="D",
    help="squared distance to the optimum at which to stop",
)
@click.option(
    "--max-rounds", type=int, default=20_000, show_default=True, metavar="N", help="at most"
)
@click.option(
    "--down-weight",
    type=float,
    default=0.0,
    show_default=True,
    metavar="W",
    help="cost of a number that a client receives; one that it sends costs 1",
)
@click.option("--seed", type=int, default=0, show_default=True, help="of cohorts and steps")
@click.option("--json", "json_path", type=OUT, metavar="FILE", help="write all rounds there")
@picture_option(help="draw the distance over numbers sent")
def federate(json_path: Path | None, picture_path: Path | None, **given: Any) -> int:
    """Deal clients out to the ranks and minimise the mean of their functions together:

    \b
      mpirun -n 4 dear-train federate --task digits --clients 100 --cohort 10

    The results are the same on any number of ranks. Numbers sent are what clients would send
    over a network of their own, in the mean; the ranks themselves exchange whole vectors.
    An algorithm that cannot reach the target within --max-rounds is stopped.
    """

    def measure(world: World, console: Console) -> int:
        from dearmpi.train.ranks.agreement import together

        console.needed = json_path is None
        with together(world, root_only=True):
            if world.is_root:
                check_apart({"--json": json_path, "--picture": picture_path})
                check_picture(picture_path)
            check_place(world, json_path)
        with together(world):
            algorithms, settings, problem = _read(given)
        trajectories = _run(world, console, algorithms, settings, problem)
        console.say(*_describe(problem, trajectories, given["split"]))
        contents = {
            "task": problem.name,
            "clients": problem.num_clients,
            "smoothness": problem.smoothness,
            "convexity": problem.convexity,
            "split": given["split"],
            "algorithms": [trajectory.as_plain() for trajectory in trajectories],
        }
        write(world, console, json_path, json.dumps(contents, indent=1) + "\n")
        if picture_path is not None:
            with together(world, root_only=True):
                if world.is_root:
                    write_picture(picture_path, _draw(problem, trajectories))
            console.say("", f"wrote {picture_path}")
        return 0

    # Every round waits for its exchange: a thread of its own would be woken twice for each.
    return measure_together(measure, progress="poll")


def _read(
    given: dict[str, Any],
) -> tuple[list[Algorithm], FederationSettings, LogisticProblem]:
    """What to compare. Raises ConfigError and TaskError."""
    from dearmpi.local.federation import ALGORITHMS, FederationSettings
    from dearmpi.train.tasks.logistic import logistic_problem

    names = [name.strip() for name in given["algorithms"].split(",") if name.strip()]
    for name in names or [""]:
        if name not in ALGORITHMS:
            raise ConfigError(
                f"--algorithms has {name!r}; {nearest(name, ALGORITHMS)}choose from "
                f"{', '.join(ALGORITHMS)}",
                code="unknown-choice",
            )
        if names.count(name) > 1:
            raise ConfigError(
                f"--algorithms has {name} {names.count(name)} times", code="given-twice"
            )
    settings = FederationSettings(
        num_clients=given["clients"],
        cohort=given["cohort"],
        sparsity=given["sparsity"],
        p=given["p"],
        target=given["target"],
        max_rounds=given["max_rounds"],
        down_weight=given["down_weight"],
        seed=given["seed"],
    )
    problem = logistic_problem(
        given["task"],
        num_clients=given["clients"],
        condition=given["condition"],
        split=given["split"],
        seed=given["seed"],
    )
    algorithms = [name for name in ALGORITHMS if name in names]
    for name in algorithms:
        settings.rule(name, problem.smoothness, problem.convexity)
    return algorithms, settings, problem


def _run(
    world: World,
    console: Console,
    algorithms: Sequence[Algorithm],
    settings: FederationSettings,
    problem: LogisticProblem,
) -> list[Trajectory]:
    from dearmpi.local.federation import run_algorithm

    optimum = problem.optimum()
    trajectories = []
    for algorithm in algorithms:
        console.show(f"running {algorithm}")
        trajectories.append(
            run_algorithm(
                algorithm,
                settings,
                start=optimum.new_zeros(problem.size),
                optimum=optimum,
                smoothness=(problem.smoothness, problem.convexity),
                slopes_of=problem.slopes_of,
                world=world,
            )
        )
    console.finish()
    return trajectories


def _describe(
    problem: LogisticProblem, trajectories: Sequence[Trajectory], split: str
) -> list[str]:
    from dearmpi.report.draw.units import align, digits

    header = ("algorithm", "cohort", "s", "p", "rounds", "steps", "sent", "received", "distance^2")
    rows = [header]
    for trajectory in trajectories:
        end, rule = trajectory.ends[-1], trajectory.rule
        rows.append(
            (
                trajectory.algorithm,
                str(rule.cohort),
                str(rule.sparsity),
                digits(rule.p),
                f"{end.rounds:,}",
                f"{end.local_steps:,}",
                f"{end.sent:,.0f}",
                f"{end.received:,.0f}",
                f"{end.squared_distance:.2g}" + ("" if trajectory.has_arrived else "  stopped"),
            )
        )
    lines = [
        f"{problem.name}, {problem.size} parameters, {problem.num_clients} clients, split by "
        f"{split}; L {digits(problem.smoothness)}, mu {digits(problem.convexity)}",
        "sent, received: numbers of a client in the mean; steps: local gradient steps",
        "",
        *align(rows),
    ]
    if trajectories and trajectories[0].down_weight:
        costs = [f"{one.algorithm} {one.cost(one.ends[-1]):,.0f}" for one in trajectories]
        lines += ["", f"cost, received at {trajectories[0].down_weight:g}: {', '.join(costs)}"]
    return lines


def _draw(problem: LogisticProblem, trajectories: Sequence[Trajectory]) -> Picture:
    """The squared distance over cost, both axes logarithmic."""
    from dearmpi.local.federation import ALGORITHMS
    from dearmpi.report.draw.curves import Curve, Panel, draw_panels

    curves = []
    for trajectory in trajectories:
        every = max(1, len(trajectory.ends) // _MOST_POINTS)
        ends = [*trajectory.ends[:-1:every], trajectory.ends[-1]]
        points = tuple((trajectory.cost(end), max(end.squared_distance, 1e-300)) for end in ends)
        colour = _COLOURS[ALGORITHMS.index(trajectory.algorithm)]
        curves.append(Curve(trajectory.algorithm.removesuffix("-scaffnew"), points, colour))
    costs = [x for curve in curves for x, _ in curve.points]
    powers = range(math.ceil(math.log10(min(costs))), math.floor(math.log10(max(costs))) + 1)
    panel = Panel("numbers sent", tuple(10.0**power for power in powers), tuple(curves))
    title = f"{problem.name}: squared distance to the optimum over numbers that a client sends"
    return draw_panels("federation", title, [panel], y_axis="squared distance to the optimum")
