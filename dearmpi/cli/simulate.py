"""dear-train simulate: what an iteration would take, by method, network and number of ranks."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dearmpi.cli.flags import (
    OUT,
    check_apart,
    check_picture,
    check_writable,
    density_option,
    engine_option,
    given_flags,
    picture_option,
    refuse_useless,
    topology_option,
    write_file,
    write_picture,
)
from dearmpi.config import EngineConfig, nearest
from dearmpi.errors import ConfigError
from dearmpi.version import describe_other_version

if TYPE_CHECKING:
    from dearmpi.cli.console import Console
    from dearmpi.plan.model.failures import FailureCost
    from dearmpi.plan.model.network import Network
    from dearmpi.plan.model.profile import ModelProfile
    from dearmpi.plan.rivals.methods import SimulatedMethod
    from dearmpi.plan.rivals.side_by_side import Comparison, PaperGain
    from dearmpi.plan.simulate.allocation import AllocationRow
    from dearmpi.plan.simulate.themis import ThemisRow

_WORLD_SIZES = (2, 4, 16, 64, 256, 1024, 4096)
_GIGABITS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


@click.command(short_help="Predict an iteration of many ranks.")
@click.option(
    "--workload",
    default="resnet50",
    show_default=True,
    metavar="NAME",
    help="resnet50, densenet201, inception_v4, bert_base, bert_large or equal:MB[:LAYERS]",
)
@click.option("--profile", type=OUT, metavar="FILE", help="of `dear-train profile`, instead")
@click.option(
    "--feed-forward-s",
    type=float,
    metavar="S",
    help="time of the feed-forward, divided among layers by FLOPs  [default: of an RTX 2080 Ti]",
)
@click.option("--backprop-s", type=float, metavar="S", help="time of the backprop")
@click.option("--world-size", type=int, default=64, show_default=True, metavar="N", help="ranks")
@click.option(
    "--network",
    default="10GbE",
    show_default=True,
    metavar="NETWORK",
    help="10GbE, 100GbIB, alpha,beta in seconds and seconds per byte of one message, or a file of "
    "`dear-train calibrate`",
)
@click.option(
    "--ranks-per-node", type=int, metavar="N", help="ranks that share a node, with --node-network"
)
@click.option(
    "--node-network",
    metavar="NETWORK",
    help="what joins the ranks of a node: alpha,beta as above, or a name; --network is then "
    "between nodes",
)
@topology_option(
    help="how DeAR's ranks are grouped: hosts, or sizes such as 8x8, from inner to outer; what "
    "each dimension costs is in a file of `dear-train calibrate --topology`, or in --node-network",
)
@engine_option("comm_dtype", help="in what every method sends fp32")
@engine_option("compress", help="how DeAR compresses; the others send all as it is")
@density_option()
@click.option(
    "--method",
    "methods",
    multiple=True,
    default=("all",),
    show_default="all",
    metavar="NAME",
    help="serial, wfbp, ddp, horovod, mg-wfbp, bytescheduler, dear-unfused, dear, dear-plan; "
    "ddp:8, horovod:64 and dear:8 set the bucket cap in MiB, horovod:64:5 also its cycle in ms; "
    "may be repeated",
)
@click.option(
    "--mtbf-hours",
    type=float,
    metavar="H",
    help="mean time between failures of one rank; tells how far apart checkpoints should be, with "
    "--checkpoint-s and --restart-s",
)
@click.option(
    "--checkpoint-s", type=float, metavar="S", help="how long a checkpoint stops training"
)
@click.option("--restart-s", type=float, metavar="S", help="from a failure to the next new step")
@click.option(
    "--json", "json_path", type=OUT, metavar="FILE", help="write the table's figures there"
)
@picture_option(help="draw iteration time over the number of ranks and over bandwidth")
@click.option(
    "--compare-paper",
    is_flag=True,
    help="the paper's five models, 64 GPUs and two networks, beside its claims",
)
@click.option(
    "--compare-themis",
    is_flag=True,
    help="all-reduces over networks of several dimensions, by Themis, beside its claims",
)
@click.option(
    "--allocation",
    is_flag=True,
    help="what dividing load and bandwidth by speed gains in a round of unequal workers "
    "(arXiv 2003.04544), and dividing a batch in a synchronous step",
)
@click.pass_context
def simulate(context: click.Context, /, **given: Any) -> int:
    """Predict an iteration of other systems and of this one, without running any:

    \b
      dear-train simulate --workload bert_base --world-size 256 --network 100GbIB
      dear-train simulate --profile profile.json --network link.json --method ddp
      dear-train simulate --compare-paper
      dear-train simulate --compare-themis
      dear-train simulate --allocation
    """
    from dearmpi.cli.console import Console

    _check_combination(context)
    check_apart(
        {"--json": given["json_path"], "--picture": given["picture_path"]},
        {"--profile": given["profile"], "--network": given["network"]},
    )
    check_writable(given["json_path"])
    check_picture(given["picture_path"])
    console = Console(speaks=True, needed=True)
    compared: Sequence[Comparison | FailureCost | PaperGain | ThemisRow | AllocationRow]
    if given["compare_themis"]:
        compared = _compare_themis(console)
    elif given["allocation"]:
        compared = _compare_allocations(console)
    else:
        compared = _compare_paper(console) if given["compare_paper"] else _compare(console, given)
    if given["json_path"] is not None:
        figures = [one.as_plain() for one in compared]
        write_file(given["json_path"], json.dumps(figures, indent=1) + "\n")
        console.say("", f"wrote {given['json_path']}")
    return 0


def _check_combination(context: click.Context) -> None:
    """Refuse flags that have no effect beside others."""
    given = given_flags(context)
    for name in ("compare_paper", "compare_themis", "allocation"):
        if name in given:
            flag = "--" + name.replace("_", "-")
            refuse_useless(context, given - {name, "json_path"}, f"has no effect beside {flag}")
    if {"topology", "picture_path"} <= given:
        raise ConfigError(
            "--picture draws other numbers of ranks, whose --topology is not known; leave out one "
            "of the two",
            code="settings-contradict",
        )
    if "profile" in given:
        instead = {"workload", "feed_forward_s", "backprop_s"}
        refuse_useless(context, given & instead, "has no effect beside --profile")


def _compare(console: Console, given: dict[str, Any]) -> Sequence[Comparison | FailureCost]:
    from dearmpi.plan.model.codec_cost import require_known_bytes
    from dearmpi.plan.model.cost import MOST_RANKS
    from dearmpi.plan.rivals.side_by_side import compare
    from dearmpi.report.draw.curves import comparison_rows, describe_comparison
    from dearmpi.report.draw.units import align

    world_size, picture_path = given["world_size"], given["picture_path"]
    if not 1 <= world_size <= MOST_RANKS:
        raise ConfigError(
            f"--world-size is {world_size}; it must be from 1 to {MOST_RANKS} ranks",
            code="out-of-range",
        )
    profile = _read_profile(given)
    has_nodes = given["ranks_per_node"] is not None
    require_known_bytes(given["compress"])
    config = EngineConfig(
        comm_dtype=given["comm_dtype"],
        compress=given["compress"],
        density=given["density"],
        topology=given["topology"],
    )
    _check_topology(config)
    network = _read_network(given["network"], config, between_nodes=has_nodes)
    network = _with_nodes(network, given).with_topology(given["topology"], world_size)
    others = [] if picture_path is None else [network.with_bandwidth(r / 8e-9) for r in _GIGABITS]
    specs = list(profile.workload.params())
    network, *others = (n.sent_as(given["comm_dtype"], specs) for n in (network, *others))
    methods = _read_methods(given["methods"])
    comparison = compare(profile, network, world_size, methods)
    failures = _count_failures(given)
    console.say(*describe_other_version(f"the profile {given['profile']}", profile.version))
    console.say(*describe_comparison(comparison), "", *align(comparison_rows(comparison)))
    if picture_path is not None:
        _draw(console, comparison, others, picture_path)
        console.say("", f"wrote {picture_path}")
    if failures is None:
        return [comparison]
    console.say("", *failures.describe())
    return [comparison, failures]


def _check_topology(config: EngineConfig) -> None:
    """Raise ConfigError for a topology that only a job has."""
    if config.topology == "auto" or config.topology_file or config.grid_order:
        raise ConfigError(
            f"--topology is {config.topology}, which only a job has; give hosts, or sizes such as "
            "8x8",
            code="unknown-choice",
        )


def _count_failures(given: dict[str, Any]) -> FailureCost | None:
    from dearmpi.plan.model.failures import cost_of_failures

    flags = ("mtbf_hours", "checkpoint_s", "restart_s")
    missing = ["--" + name.replace("_", "-") for name in flags if given[name] is None]
    if len(missing) == len(flags):
        return None
    if missing:
        raise ConfigError(
            f"failures need {' and '.join(missing)} as well; give --mtbf-hours, --checkpoint-s and "
            "--restart-s, or none of them",
            code="setting-missing",
        )
    return cost_of_failures(
        given["world_size"],
        rank_mtbf_s=3600 * given["mtbf_hours"],
        checkpoint_s=given["checkpoint_s"],
        restart_s=given["restart_s"],
    )


def _read_profile(given: dict[str, Any]) -> ModelProfile:
    from dearmpi.plan.data.workload import read_workload
    from dearmpi.plan.model.profile import profile_workload, read_profile
    from dearmpi.plan.rivals.side_by_side import paper_profile

    if given["profile"] is not None:
        return read_profile(given["profile"])
    if given["workload"].endswith(".json"):
        raise ConfigError(
            f"there is no workload {given['workload']!r}; give a file of dear-train profile by "
            "--profile",
            code="unknown-choice",
        )
    workload = read_workload(given["workload"])
    feed_forward_s, backprop_s = given["feed_forward_s"], given["backprop_s"]
    if feed_forward_s is None and backprop_s is None:
        return paper_profile(workload)
    if feed_forward_s is None or backprop_s is None:
        missing = "--feed-forward-s" if feed_forward_s is None else "--backprop-s"
        raise ConfigError(
            f"{missing} is missing; give both times or neither", code="setting-missing"
        )
    return profile_workload(workload, feed_forward_s=feed_forward_s, backprop_s=backprop_s)


def _read_network(text: str, config: EngineConfig, *, between_nodes: bool) -> Network:
    from dearmpi.plan.model.codec_cost import codec_bytes
    from dearmpi.plan.model.network import PRESETS, Network, parse_network
    from dearmpi.tune.calibration import read_calibration

    has_comma = "," in text and os.path.isfile(text)  # as in the name of a run of a sweep
    network = None if has_comma else parse_network(text)
    if network is not None:
        is_plain = config.compress == "none"
        return network.compressed(
            None if is_plain else codec_bytes(config.compress, config.sent_density)
        )
    if not os.path.exists(text):
        names = [preset.name for preset in PRESETS]
        raise ConfigError(
            f"there is no network {text!r}, nor a file of that name; {nearest(text, names)}choose "
            f"one of {', '.join(names)}, write alpha,beta, or name a file of dear-train calibrate",
            code="unknown-choice",
        )
    calibration = read_calibration(text)
    host, most = Counter(calibration.hosts).most_common(1)[0]
    if between_nodes and most > 1:
        raise ConfigError(
            f"{text} was measured with {most} ranks on {host}, so that what joins those is in it "
            "already; leave out --ranks-per-node and --node-network, or calibrate with one rank on "
            "each node",
            code="settings-contradict",
        )
    source = [f"measured with {calibration.world_size} ranks, {calibration.library}"]
    source += describe_other_version("it", calibration.version)
    source += [] if calibration.flaw is None else [calibration.flaw]
    levels = None if calibration.grid is None else calibration.grid.levels
    measured = Network(Path(text).name, calibration.costs, "; ".join(source), levels=levels)
    return measured.compressed(calibration.codec_for(config, text))


def _with_nodes(network: Network, given: dict[str, Any]) -> Network:
    from dearmpi.plan.model.network import parse_node

    num_ranks, text = given["ranks_per_node"], given["node_network"]
    if num_ranks is None and text is None:
        return network
    if num_ranks is None or text is None:
        missing = "--ranks-per-node" if num_ranks is None else "--node-network"
        raise ConfigError(f"{missing} is missing; give both, or neither", code="setting-missing")
    return network.with_node(parse_node(text, num_ranks))


def _read_methods(names: Sequence[str]) -> list[SimulatedMethod]:
    from dearmpi.plan.rivals.methods import METHODS, parse_method

    if list(names) == ["all"]:
        return list(METHODS)
    if "all" in names:
        raise ConfigError(
            "--method all has all methods already; leave out the others, or all",
            code="settings-contradict",
        )
    methods = [parse_method(name) for name in names]
    for method in methods:
        count = sum(method.name == other.name for other in methods)
        if count > 1:
            raise ConfigError(f"method {method.name} is given {count} times", code="given-twice")
    return methods


def _draw(console: Console, comparison: Comparison, others: Sequence[Network], path: Path) -> None:
    """The same methods over other numbers of ranks, and over ``others``, of other bandwidths."""
    from dearmpi.plan.rivals.side_by_side import compare
    from dearmpi.report.draw.curves import draw_comparisons

    methods = [row.method for row in comparison.rows]
    profile, network = comparison.profile, comparison.network
    by_size, by_rate = [], []
    for world_size in _WORLD_SIZES:
        console.show(f"simulating {world_size} ranks")
        by_size.append(compare(profile, network, world_size, methods))
    for other in others:
        console.show(f"simulating {other.name}")
        by_rate.append(compare(profile, other, comparison.world_size, methods))
    console.finish()
    write_picture(path, draw_comparisons(by_size, by_rate, _GIGABITS))


def _compare_paper(console: Console) -> Sequence[PaperGain]:
    from dearmpi.plan.model.network import PRESETS
    from dearmpi.plan.rivals.side_by_side import (
        CAPS_MB,
        DEVICE,
        PARTITION_NUMEL,
        WORLD_SIZE,
        paper_gains,
    )
    from dearmpi.report.draw.curves import describe_gains, gain_rows
    from dearmpi.report.draw.units import align

    console.say(
        f"{WORLD_SIZE} ranks. {DEVICE}.",
        "gain: of DeAR over the best of the others, each with fusion or each without; where they "
        f"fuse, DeAR has the best of {len(CAPS_MB)} bucket caps, and the others are as they come.",
        f"ByteScheduler cuts tensors at {PARTITION_NUMEL / 1e6:g} million elements, as the paper's "
        "authors had it.",
        "overlap: WFBP's bound over DeAR's, for DeAR's buckets; limit: 1 + t_ff / (2 t_bp).",
        "start-up: what the other loses to that of its operations, over what DeAR loses to it.",
        "rest: what is left of the gain, from fusion and what nothing hides at a pass's ends.",
    )
    all_gains: list[PaperGain] = []
    for network in PRESETS:
        gains = paper_gains(network)
        console.say("", f"{network.name}: {network.source}", "", *align(gain_rows(gains)))
        console.say("", *describe_gains(gains))
        all_gains += gains
    return all_gains


def _compare_themis(console: Console) -> Sequence[ThemisRow]:
    from dearmpi.chunk_orders import NUM_CHUNKS
    from dearmpi.plan.simulate.themis import PAPER, compare_themis
    from dearmpi.report.draw.units import align

    rows = compare_themis()
    console.say(
        f"1024 ranks, all-reduces of 100 MB to 1 GB in {NUM_CHUNKS} chunks, means over sizes.",
        "used: the part of all links' time in which they send; speed-up over the baseline, whose",
        "chunks all cross the dimensions in the same order. A dimension sends one chunk at a time.",
        "",
        *align(
            [
                ["topology", "used: baseline", "Themis", "smallest first", "speed-up", "smallest"],
                *(
                    [
                        row.topology,
                        *(f"{100 * part:.1f} %" for part in (row.baseline, row.fifo, row.smallest)),
                        f"{row.fifo_gain:.2f}",
                        f"{row.smallest_gain:.2f}",
                    ]
                    for row in (*rows, PAPER)
                ),
            ]
        ),
    )
    return rows


def _compare_allocations(console: Console) -> Sequence[AllocationRow]:
    from dearmpi.plan.simulate.allocation import NUM_WORKERS, compare_allocations
    from dearmpi.report.draw.units import align

    rows = compare_allocations()
    console.say(
        f"{NUM_WORKERS} workers whose links and speeds differ by the factor; times of a round of "
        "the paper's problem,",
        "with one band that all share, over that of equal workers; gain: of joint over even.",
        "batch: a step of synchronous training whose samples are divided by speed, over one whose",
        "samples are divided evenly. There compute follows samples, and links are not shared.",
        "",
        *align(
            [
                ["factor", "even", "band", "load", "joint", "gain", "batch"],
                *(
                    [
                        f"{row.spread:g}",
                        *(f"{time:.3f}" for time in (row.even, row.band, row.load, row.joint)),
                        f"{1 - row.joint / row.even:.0%}",
                        f"{row.samples:.3f}",
                    ]
                    for row in rows
                ),
            ]
        ),
    )
    return rows
