"""The benchmark works on any number of ranks; what it measures is nobody's business here."""

from __future__ import annotations

import json
import re
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dearmpi.bench import benchmark as session
from dearmpi.bench import comparison as bench_contest
from dearmpi.bench.benchmark import BenchmarkSettings, run_benchmark
from dearmpi.bench.collective_times import describe_collectives, measure_collectives
from dearmpi.bench.method import Entrant, Method, Setup
from dearmpi.bench.method_names import plug_in, read_method
from dearmpi.bench.output import collectives_json, describe_result, result_json
from dearmpi.bench.result import LinkTimes, Result
from dearmpi.bench.torch_methods import leave_group
from dearmpi.comm.world import World
from dearmpi.errors import DearError
from dearmpi.plan.data.layout import ParamSpec
from dearmpi.plan.data.workload import LayerSpec, Workload, float_layer, read_workload
from tests.mpi.collectives.contributions import ADDED_HERE, ALGORITHMS
from tests.mpi.comparisons import SHORT, contest

GATHERS = ["all-gather native", "all-gather ring"]

pytestmark = pytest.mark.ranks(1, 2)

TIED = Workload(
    "tied",
    "",
    (
        float_layer("embedding", {"weight": (50, 4)}, 0),
        float_layer("layer.0.dense", {"weight": (40, 4), "bias": (3,)}, 1),
        float_layer("layer.1.dense", {"weight": (40, 4), "bias": (1,)}, 1),
        float_layer("head", {"bias": (50,)}, 0),
        LayerSpec("head.decoder", (), 3, uses=("embedding.weight",)),
    ),
    batch_size=8,
    unit="seq",
)


@pytest.mark.parametrize(
    "workload",
    [pytest.param(None, id="equal", marks=pytest.mark.slow), pytest.param(TIED, id="tied")],
)
def test_every_method_trains_the_same_model(world: World, workload: Workload | None) -> None:
    names = ["serial", "wfbp", "dear", "dear:0.01:window=1", "ddp", "ddp:1", "ddp-bf16", "fsdp2"]
    names += ["dear:comm_dtype=bf16", "ddp:comm_dtype=fp16", "ddp:view=true", "ddp-bf16:view=true"]
    names += ["fsdp2:reshard=false", "ddp-powersgd", "ddp-powersgd:rank=2:start=3"]
    names += ["ddp-localsgd:period=2"]
    result, lines = contest(world, *map(read_method, names), workload=workload)
    assert {row.label: row.error for row in result.rows} == dict.fromkeys(names, "")
    assert all(len(row.iterations()) == 2 for row in (result.alone, *result.rows))
    assert len(lines) == 1 + len(names)
    assert result.bounds is not None
    assert result.link and result.bounds.communication_s > 0
    text = "\n".join(describe_result(result))
    assert all(f"\n{name} " in text for name in names)
    plain = json.loads(result_json(result))
    assert [row["label"] for row in plain["rows"]] == names
    assert not dist.is_initialized()


def test_computation_alone_takes_what_the_layers_sleep(world: World) -> None:
    """But for what they make up for of a sleep that was late, of 10 ms at most."""
    result, _ = contest(world, read_method("dear"), compute_s=0.06)
    assert result.bounds is not None
    assert result.bounds.compute_s > 0.9 * 0.06


def test_what_is_there_is_kept_after_each_block(world: World) -> None:
    """For a rank that the system kills takes the whole job with it."""
    seen = []
    methods = ["dear", "wfbp"]
    question = BenchmarkSettings(
        "equal:0.1:4", methods, feed_forward_s=0.002, backprop_s=0.004, length=SHORT
    )
    run_benchmark(
        world,
        question,
        lambda line: None,
        keep=lambda result: seen.append([len(row.blocks) for row in result.rows]),
    )
    assert seen == [[0, 0], [1, 0], [1, 1]]


@pytest.mark.ranks(2)
def test_frozen_parameters_are_no_communication(world: World) -> None:
    layers = (
        LayerSpec("frozen", (ParamSpec("frozen.weight", (5000,), trained=False),), 1),
        float_layer("head", {"weight": (100,)}, 1),
    )
    workload = Workload("tuned", "", layers, batch_size=8, unit="img")
    result, _ = contest(world, read_method("dear"), workload=workload)
    assert (result.num_buckets, result.payload_bytes) == (1, 400)
    assert not result.rows[0].error


def test_a_plug_in_takes_part(world: World) -> None:
    result, _ = contest(world, plug_in("tests.mpi.entrants:plug_in"))
    assert not result.rows[0].error and len(result.rows[0].blocks) == 1


@pytest.mark.ranks(2)
def test_gradients_of_ddp_are_views_into_its_buckets_where_that_is_asked_for(world: World) -> None:
    num_storages = {}

    def watch(text: str) -> Method:
        method = read_method(text)

        def enter(setup: Setup) -> Entrant:
            entrant = method.enter(setup)

            def count() -> None:
                grads = [param.grad for param in setup.model.parameters()]
                places = {grad.untyped_storage().data_ptr() for grad in grads if grad is not None}
                num_storages[text] = len(places)

            return replace(entrant, finish=count)

        return replace(method, factory=enter)

    result, _ = contest(world, watch("ddp"), watch("ddp:view=true"))
    assert not any(row.error for row in result.rows)
    assert num_storages == {"ddp": 4, "ddp:view=true": 1}  # layers, and the bucket of all


class _Gathers(TorchDispatchMode):
    """Counts the all-gathers of torch's groups."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.c10d._allgather_base_.default
        return func(*args, **(kwargs or {}))


@pytest.mark.ranks(2)
def test_fsdp2_gathers_parameters_once_where_it_is_to_keep_them(world: World) -> None:
    num_gathers = {}
    for text in ("fsdp2", "fsdp2:reshard=false"):
        with _Gathers() as gathers:  # type: ignore[no-untyped-call]
            result, _ = contest(world, read_method(text))
        assert not result.rows[0].error
        num_gathers[text] = gathers.count
    assert num_gathers == {"fsdp2": 2 * 3 * 4, "fsdp2:reshard=false": 3 * 4}  # iterations, layers


def test_what_uses_the_group_is_gone_before_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freed last, DDP would wait for the group's threads with the interpreter's lock held."""
    models: list[weakref.ref[nn.Module]] = []
    left: list[bool] = []

    def enter(setup: Setup) -> Entrant:
        entrant = plug_in("tests.mpi.entrants:plug_in").enter(setup)
        models.append(weakref.ref(entrant.model))
        return entrant

    def leave(*others: object, failed: bool) -> None:
        left.extend(model() is None for model in models)
        leave_group(*others, failed=failed)

    monkeypatch.setattr(bench_contest, "leave_group", leave)
    contest(world, Method("ddp", enter))
    assert left == [True]


@pytest.mark.ranks(2)
def test_the_ratio_sets_the_compute_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    trials = [LinkTimes(0.0, 0.001), LinkTimes(0.010, 0.020), LinkTimes(1.0, 2.0)]
    monkeypatch.setattr(session, "measure_link", lambda *_, **__: trials)
    question = BenchmarkSettings("equal:1:4", ["dear"], ratio=0.5, length=SHORT, batch_size=7)
    result = run_benchmark(world, question, lines.append)
    (said,) = [line for line in lines if line.startswith("compute time")]
    # Communication is half of it, and backprop twice the feed-forward.
    assert said == "compute time: feed-forward 20.0 ms, backprop 40.0 ms"
    assert result.batch_size == 7


@pytest.mark.ranks(2)
def test_a_plan_is_made_before_it_is_measured(world: World) -> None:
    result, _ = contest(world, read_method("planned"))
    row = result.rows[0]
    assert not row.error and len(row.iterations()) == SHORT.num_batches
    assert " s predicted, " in "\n".join(describe_result(result))


@pytest.mark.ranks(2)
def test_a_search_for_the_cap_is_over_before_it_is_measured(world: World) -> None:
    result, _ = contest(world, read_method("bayes"), workload=read_workload("equal:4:4"))
    (row,) = result.rows
    assert not row.error and len(row.iterations()) == SHORT.num_batches
    text = "\n".join(describe_result(result))
    told = re.search(r"\nbayes, round 0: ([0-9.]+) MiB, the best of 10 caps, [0-9.]+ s in", text)
    assert told is not None and 1 <= float(told[1]) <= 3.82  # MiB: the model has 4 MB


def test_a_real_task_is_measured(world: World, tmp_path: Any) -> None:
    (tmp_path / "tiny.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "from dearmpi.train.tasks.task import Task\n"
        "def make(options):\n"
        "    data = [torch.full((3,), i / 7) for i in range(7)]\n"
        "    loss = lambda model, batch: model(batch).square().mean()\n"
        "    return Task('tiny', nn.Linear(3, 2), data, loss, unit='images')\n"
    )
    question = BenchmarkSettings(
        f"{tmp_path}/tiny.py:make", ["dear", "ddp"], length=SHORT, batch_size=3
    )
    result = run_benchmark(world, question, lambda line: None)
    assert (result.subject, result.unit) == ("tiny", "image")
    assert not [row.error for row in result.rows if row.error]


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (BenchmarkSettings("resnet51", ["dear"]), ("resnet51", "bert_base")),
        (BenchmarkSettings("equal:1", ["deer"]), ("deer", "wfbp")),
        (BenchmarkSettings("equal:1", ["dear:window=x"]), ("window", "x")),
        (BenchmarkSettings("digits", ["dear"], ratio=1.0), ("digits", "ratio")),
        (BenchmarkSettings("equal:1", ["alone:8"]), ("alone:8", "no options")),
    ],
    ids=["workload", "method", "option", "ratio", "alone"],
)
def test_a_question_without_answer_is_refused_on_all_ranks(
    world: World, question: BenchmarkSettings, words: tuple[str, ...]
) -> None:
    with pytest.raises(DearError) as caught:
        run_benchmark(world, question, lambda line: None)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("workload", "method", "words"),
    [
        ("equal:0.1", "dear:master_weights=true", "master_weights has no effect"),
        ("equal:0.1", "bayes", "one rank sends nothing"),
        ("digits", "fsdp2:reuse_pages=false", "on replayed models only"),
    ],
)
def test_what_a_model_leaves_without_effect_is_refused_before_anything_is_measured(
    world: World, workload: str, method: str, words: str
) -> None:
    time_s = None if workload == "digits" else 0.001
    methods = ["dear", method]
    question = BenchmarkSettings(
        workload, methods, feed_forward_s=time_s, backprop_s=time_s, length=SHORT
    )
    kept: list[Result] = []
    with pytest.raises(DearError, match=f"method '{method}': .*{words}"):
        run_benchmark(world, question, lambda line: None, keep=kept.append)
    assert not kept


@pytest.mark.ranks(1)
def test_one_rank_has_no_communication_to_set_the_time_by(world: World) -> None:
    with pytest.raises(DearError, match="--feed-forward-s"):
        run_benchmark(world, BenchmarkSettings("equal:1", ["dear"], ratio=1.0), lambda line: None)


@pytest.mark.ranks(2)
def test_collectives_are_measured_on_every_size(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(2)
    result = measure_collectives(world, [0.01, 0.1], repeats=2, tell=lambda line: None)
    assert torch.get_num_threads() == 1
    names = [f"reduce-scatter {algorithm}" for algorithm in ALGORITHMS] + GATHERS
    assert [row.name for row in result.rows] == 2 * names
    assert all(row.each_s > 0 and 0 <= row.overlap.imb <= 1 for row in result.rows)
    assert len(describe_collectives(result)) == 4 + len(result.rows)
    assert len(json.loads(collectives_json(result))["rows"]) == 2 * len(names)


@pytest.mark.ranks(2)
def test_collectives_in_half_precision_are_those_that_can(world: World) -> None:
    result = measure_collectives(world, [0.1], repeats=1, tell=lambda line: None, wire_dtype="bf16")
    names = [f"reduce-scatter {algorithm}" for algorithm in ADDED_HERE] + GATHERS
    assert [row.name for row in result.rows] == names
    for row in result.rows:  # half of each buffer goes to the other rank, at two bytes an element
        assert row.wire_bits_s * row.each_s == pytest.approx(8 * row.nbytes / 4)
    assert "sent as bf16" in "\n".join(describe_collectives(result))
