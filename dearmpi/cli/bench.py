"""dear-train bench: methods side by side."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dearmpi.cli.endings import measure_together
from dearmpi.cli.flags import (
    OUT,
    check_apart,
    check_place,
    engine_option,
    given_flags,
    refuse_useless,
    topology_option,
    write,
    write_file,
)
from dearmpi.config import EngineConfig
from dearmpi.errors import ConfigError

if TYPE_CHECKING:
    from dearmpi.bench.result import Result
    from dearmpi.cli.console import Console
    from dearmpi.comm.world import World

_METHODS = "serial,wfbp,dear,ddp"
_STALL_S = (300.0, 900.0)  # a bucket of a large model over a slow wire takes its time
_OF_COLLECTIVES = frozenset({"sizes_mb", "topology"})
_FOR_COLLECTIVES = _OF_COLLECTIVES | {"collectives", "comm_dtype", "num_iters", "json_path"}


@dataclass(frozen=True, slots=True)
class Contents:
    """What to write."""

    json: str
    picture: str = ""


@click.command(short_help="Measure methods of data-parallel training.")
@click.option(
    "--workload",
    default="resnet50",
    show_default=True,
    metavar="NAME",
    help="resnet50, densenet201, inception_v4, bert_base, bert_large or equal:MB[:LAYERS], "
    "or the FILE.json of `dear-train profile`, "
    "replayed; or a task of `dear-train run`, computed: bytes-lm, synthetic:resnet50 ...",
)
@click.option(
    "--methods",
    default=_METHODS,
    show_default=True,
    metavar="LIST",
    help="of serial, wfbp, dear, planned (plan='auto'), bayes (a search for the bucket cap), "
    "local (exchanges every few steps), ddp, ddp-bf16, ddp-localsgd, ddp-powersgd, fsdp2, and "
    "horovod and deepspeed where they are installed; "
    "dear:2:window=3, ddp:8, deepspeed:stage=2 set the bucket cap in MiB and other settings",
)
@click.option(
    "--method",
    "plug_ins",
    multiple=True,
    metavar="MODULE:FACTORY",
    help="a method of your own; may be repeated",
)
@click.option(
    "--ratio",
    type=float,
    metavar="R",
    help="replay: communication over computation, by which the compute time is set  [default: 1]",
)
@click.option("--feed-forward-s", type=float, metavar="S", help="replay: time of the feed-forward")
@click.option("--backprop-s", type=float, metavar="S", help="replay: time of the backprop")
@click.option("--batch-size", type=int, metavar="N", help="samples per rank")
@click.option(
    "--num-warmup-batches",
    type=int,
    default=3,
    show_default=True,
    metavar="N",
    help="iterations before each block that do not count; beside planned or bayes every method "
    "has more, as many as a plan takes at least, and on several hosts as many as take 4 s",
)
@click.option(
    "--num-batches-per-iter",
    type=int,
    default=5,
    show_default=True,
    metavar="N",
    help="iterations of each block",
)
@click.option("--num-iters", type=int, default=3, show_default=True, metavar="N", help="rounds")
@click.option("--json", "json_path", type=OUT, metavar="FILE", help="write everything there")
@click.option("--picture", "picture_path", type=OUT, metavar="FILE.svg", help="draw it")
@click.option(
    "--collectives",
    is_flag=True,
    help="measure reduce-scatters and all-gathers by themselves instead",
)
@click.option(
    "--sizes-mb",
    default="0.25,1,4,25",
    show_default=True,
    metavar="LIST",
    help="sizes for --collectives, in millions of bytes",
)
@topology_option(
    help="with --collectives: also by dimensions, measured and predicted: hosts, sizes such as 2x2 "
    "or 2x2/1x1, or a .json file; methods take it as dear:topology=hosts",
)
@engine_option(
    "comm_dtype",
    help="in what fp32 is sent: by --collectives, by communication alone, and by methods that do "
    "not say themselves, as dear:comm_dtype=bf16 does; ddp takes torch's hook",
)
@click.pass_context
def bench(
    context: click.Context, /, json_path: Path | None, picture_path: Path | None, **given: Any
) -> int:
    """Measure methods of data-parallel training side by side:

    \b
      mpirun -n 4 dear-train bench --workload resnet50 --methods dear,wfbp,ddp:8
      mpirun -n 4 dear-train bench --collectives

    If a method is missing or fails, the others go on, and the exit code is 1.
    """
    _check_combination(context)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # gloo warns of nameless addresses
    from dearmpi.comm.watchdog.watchdog import StallLimits

    def measure(world: World, console: Console) -> int:
        return _measure(world, console, given, json_path=json_path, picture_path=picture_path)

    return measure_together(measure, stall_limits=StallLimits(*_STALL_S))


def _check_combination(context: click.Context) -> None:
    """Refuse flags that have no effect on what is to be measured."""
    given = given_flags(context)
    useless, reason = given & _OF_COLLECTIVES, "has an effect together with --collectives only"
    if "collectives" in given:
        useless, reason = given - _FOR_COLLECTIVES, "has no effect together with --collectives"
    refuse_useless(context, useless, reason)


def _measure(
    world: World,
    console: Console,
    given: dict[str, Any],
    *,
    json_path: Path | None,
    picture_path: Path | None,
) -> int:
    from dearmpi.train.ranks.agreement import together

    console.needed = json_path is None  # a file has it all
    with together(world, root_only=True):
        if picture_path is not None and picture_path.suffix != ".svg":
            raise ConfigError(
                f"--picture is {picture_path}; its name must end in .svg", code="malformed-value"
            )
        outputs = {"--json": json_path, "--picture": picture_path}
        if world.is_root:
            check_apart(outputs, {"--workload": given["workload"]})
        check_place(world, json_path, picture_path)
    if given["collectives"]:
        lines, contents, code = _measure_collectives(world, console, given)
    else:
        lines, contents, code = _measure_methods(world, console, given, json_path=json_path)
    console.say("", *lines)
    write(world, console, json_path, contents.json)
    write(world, console, picture_path, contents.picture)
    return code


def _measure_methods(
    world: World, console: Console, given: dict[str, Any], *, json_path: Path | None
) -> tuple[list[str], Contents, int]:
    from dearmpi.bench.benchmark import BenchmarkSettings, run_benchmark
    from dearmpi.bench.comparison import Length
    from dearmpi.bench.output import describe_result, draw, result_json
    from dearmpi.train.ranks.agreement import together

    with together(world):
        benchmark = BenchmarkSettings(
            workload=given["workload"],
            methods=_split(given["methods"]),
            plug_ins=given["plug_ins"],
            ratio=given["ratio"],
            feed_forward_s=given["feed_forward_s"],
            backprop_s=given["backprop_s"],
            batch_size=given["batch_size"],
            comm_dtype=given["comm_dtype"],
            length=Length(
                num_warmup=given["num_warmup_batches"],
                num_batches=given["num_batches_per_iter"],
                num_rounds=given["num_iters"],
            ),
        )

    def keep(result: Result) -> None:
        """What there is, should the next block end the whole job: the system may kill a rank."""
        with together(world, root_only=True):
            if world.is_root and json_path is not None:
                write_file(json_path, result_json(result))

    result = run_benchmark(world, benchmark, console.say, keep=keep)
    contents = Contents(result_json(result), draw(result))
    return describe_result(result), contents, 1 if result.problems() else 0


def _measure_collectives(
    world: World, console: Console, given: dict[str, Any]
) -> tuple[list[str], Contents, int]:
    from dearmpi.bench.collective_times import describe_collectives, measure_collectives
    from dearmpi.bench.output import collectives_json
    from dearmpi.train.ranks.agreement import together

    with together(world):
        EngineConfig(topology=given["topology"])  # refused before anything is measured
        sizes_mb = _read_sizes(given["sizes_mb"])
        if given["num_iters"] < 1:
            raise ConfigError(
                f"--num-iters is {given['num_iters']}; it must be 1 or more", code="out-of-range"
            )
        if world.size == 1:
            raise ConfigError(
                "one rank has no collectives; start several with mpirun", code="one-rank-only"
            )
    result = measure_collectives(
        world,
        sizes_mb,
        repeats=given["num_iters"],
        tell=console.say,
        wire_dtype=None if given["comm_dtype"] == "fp32" else given["comm_dtype"],
        topology=given["topology"],
    )
    return describe_collectives(result), Contents(collectives_json(result)), 0


def _read_sizes(text: str) -> list[float]:
    try:
        sizes = [float(part) for part in _split(text)]
    except ValueError:
        raise ConfigError(
            f"--sizes-mb is {text!r}; write numbers, such as 1,4,25", code="malformed-value"
        ) from None
    if not sizes or not all(0 < size <= 2000 for size in sizes):
        raise ConfigError(
            f"--sizes-mb is {text!r}; sizes must be above 0 and at most 2000 MB",
            code="out-of-range",
        )
    return sizes


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
