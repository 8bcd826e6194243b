"""The page about large numbers of ranks, from the simulator, as ``dear-train simulate --json``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import product

from dearmpi.plan.data.workload import read_workload
from dearmpi.plan.model.failures import cost_of_failures
from dearmpi.plan.model.network import PRESETS, Network, link_network
from dearmpi.plan.rivals.methods import parse_method
from dearmpi.plan.rivals.side_by_side import CLAIMS, compare, paper_gains, paper_profile
from dearmpi.plan.simulate.themis import PAPER, compare_themis

Table = Callable[[tuple[str, ...], Iterable[tuple[str, ...]]], str]

SIZES = (64, 256, 1024, 4096)
WORST_ERROR = 0.077  # of 180 predictions on 2 and 4 hosts: benchmarks/README.md
LINK_ERROR = 0.2  # beyond which a plan refuses a calibration
RANK_MTBF_H = 50_700  # Llama 3 (arXiv 2407.21783): 16,384 GPUs, 419 interruptions in 54 days
CHECKPOINT_S, RESTART_S = 1.0, 300.0


def percent(share: float, digits: int = 1) -> str:
    """As the other pages write it."""
    return f"{100 * share:.{digits}f} %"


def scaled(network: Network, alpha: float, beta: float) -> Network:
    """``network`` with start-ups and bytes that cost so many times as much."""
    link = network.costs.reduce_scatter  # of two ranks, which send half of a buffer
    return link_network(
        network.name, alpha * link.alpha_s, 2 * beta * link.beta_s_per_byte, network.source
    )


def iteration_s(model: str, network: Network, num_ranks: int, method: str, grid: str) -> float:
    """Simulated seconds of an iteration."""
    network = network.with_topology(grid, num_ranks)
    rows = compare(
        paper_profile(read_workload(model)), network, num_ranks, [parse_method(method)]
    ).rows
    return rows[0].iteration_s


def ladder(table: Table) -> str:
    """What the simulator was held against."""
    mean = compare_themis()[-1]
    used = (
        (mean.baseline, PAPER.baseline),
        (mean.fifo, PAPER.fifo),
        (mean.smallest, PAPER.smallest),
    )
    gains = (mean.fifo_gain, PAPER.fifo_gain), (mean.smallest_gain, PAPER.smallest_gain)
    rows = [
        (
            "iterations of five models, 2 and 4 hosts "
            "([table](../../benchmarks/README.md#predicted-and-measured))",
            "180 measured",
            f"median 1.1 %, worst {percent(WORST_ERROR)}",
        ),
        (
            "Themis, 1,024 ranks, links used (`--compare-themis`)",
            ", ".join(percent(theirs) for _, theirs in used),
            ", ".join(f"{100 * (ours - theirs):+.1f} points" for ours, theirs in used),
        ),
        (
            "Themis, gains",
            ", ".join(f"{theirs:.2f}" for _, theirs in gains),
            ", ".join(f"{100 * (ours / theirs - 1):+.1f} %" for ours, theirs in gains),
        ),
    ]
    for network in PRESETS:
        best = max(gain.factor for gain in paper_gains(network)) - 1
        claim = f"up to {percent(CLAIMS[network.name], 0)}"
        told = f"{percent(best)}: not reproduced"
        rows.append(
            (f"DeAR, 64 GPUs, {network.name}, largest gain (`--compare-paper`)", claim, told)
        )
    return table(("held against", "theirs", "difference, or ours"), rows)


def iterations(table: Table) -> str:
    """Iterations on more and more ranks."""
    rows = []
    for network, model, num_ranks in product(PRESETS, ("resnet50", "bert_base"), SIZES):
        side = math.isqrt(num_ranks)
        profile = paper_profile(read_workload(model))
        alone_s = profile.feed_forward_s + profile.backprop_s
        grids = "flat", f"{side}x{side}"
        flat_s, grid_s = (iteration_s(model, network, num_ranks, "dear", grid) for grid in grids)
        grid = grids[grid_s < flat_s]
        around = [
            iteration_s(model, scaled(network, alpha, beta), num_ranks, "dear", grid)
            for alpha, beta in product((1 - LINK_ERROR, 1 + LINK_ERROR), repeat=2)
        ]
        least, most = min(around) * (1 - WORST_ERROR), max(around) * (1 + WORST_ERROR)
        ddp_s = iteration_s(model, network, num_ranks, "ddp", "flat")
        cells = (alone_s, ddp_s, flat_s, grid_s)
        shown = [f"{cell:.3f}" for cell in cells]
        range_s = f"{max(least, alone_s):.3f} to {most:.3f}"
        rows.append((model, network.name, f"{num_ranks:,}", *shown, range_s))
    heads = ("model", "network", "ranks", "alone s", "`ddp` s", "`dear` flat s")
    return table((*heads, "`dear` grid s", "range of the better"), rows)


def start_ups(table: Table) -> str:
    """What a bucket's messages cost to start."""
    rows = []
    for num_ranks in SIZES:
        side = math.isqrt(num_ranks)
        rounds = 2 * (num_ranks - 1), 4 * (side - 1)
        costs = (
            f"{1e3 * count * network.costs.reduce_scatter.alpha_s:.1f}"
            for count in rounds
            for network in PRESETS
        )
        rows.append((f"{num_ranks:,}", *costs))
    names = [f"{grid}, {network.name}" for grid in ("flat", "grid") for network in PRESETS]
    return table(("ranks", *names), rows)


def stragglers(table: Table) -> str:
    """How the slowest of many ranks compares with the middle one."""
    rows = []
    for num_ranks in (8, *SIZES):
        late = (
            f"{math.exp(spread * math.sqrt(2 * math.log(num_ranks))):.2f}"
            for spread in (0.01, 0.03, 0.1)
        )
        rows.append((f"{num_ranks:,}", *late))
    return table(("ranks", "spread of 1 %", "3 %", "10 %"), rows)


def failures(table: Table) -> str:
    """What failures take from a long job."""
    rows = []
    for num_ranks in SIZES:
        cost = cost_of_failures(
            num_ranks,
            rank_mtbf_s=3600.0 * RANK_MTBF_H,
            checkpoint_s=CHECKPOINT_S,
            restart_s=RESTART_S,
        )
        hours, lost = f"{cost.mtbf_s / 3600:.3g} h", percent(cost.lost, 2)
        rows.append((f"{num_ranks:,}", hours, f"{cost.interval_s:.0f} s", lost))
    return table(("ranks", "a failure every", "best interval", "lost"), rows)


def scale_page(note: str, table: Table) -> str:
    """The page's text."""
    return (
        f"{note}\n# Many ranks\n\n"
        "What `dear-train simulate` predicts where nobody has measured. Contention, adaptive "
        "routing and uneven links\nare not in the model. Ranges are no guarantees.\n\n"
        "## What the simulator was held against\n\n"
        f"{ladder(table)}\n"
        "[Planning](../explanation/planning.md) says what explains the difference to DeAR's "
        "figures. MG-WFBP's tables are not\ncompared: its models and GPUs have no profiles "
        "here.\n\n"
        "## An iteration\n\n"
        "`dear-train simulate --workload bert_base --world-size 4096 --network 10GbE "
        "--topology 64x64`, the paper's GPUs.\nThe grid is the square one, all of its dimensions "
        f"at one rate. The range has start-ups and bandwidth\n{percent(LINK_ERROR, 0)} off, each "
        f"way, and the worst error above, {percent(WORST_ERROR)}.\n\n"
        f"{iterations(table)}\n"
        "## Start-ups\n\n"
        "Milliseconds that both halves of one bucket spend on starting messages.\n\n"
        f"{start_ups(table)}\n"
        "Tables that grow with the ranks are small: `python benchmarks/many_ranks.py` measures "
        "them\n([figures](../../benchmarks/README.md#what-the-engine-costs-a-rank)).\n\n"
        "## Late ranks\n\n"
        "The slowest rank over the middle one, where times spread log-normally: about "
        "`exp(spread * sqrt(2 ln P))`. A run's\nown spread is `rank_times` in `metrics.jsonl`. "
        "`--batch-shares auto` removes what stays the same from step to step.\n\n"
        f"{stragglers(table)}\n"
        "## Failures\n\n"
        f"`dear-train simulate --mtbf-hours {RANK_MTBF_H} --checkpoint-s {CHECKPOINT_S:g} "
        f"--restart-s {RESTART_S:g}`, by Daly (2006). Llama 3 was\ninterrupted 419 times in 54 "
        f"days on 16,384 GPUs: once in {RANK_MTBF_H:,} hours of a GPU.\n\n"
        f"{failures(table)}"
    )
