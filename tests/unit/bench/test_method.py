"""Methods by name, and questions that contradict themselves."""

from __future__ import annotations

from typing import Any, cast

import pytest
from torch import nn
from torch.optim import SGD

from dearmpi import DistributedOptimizer
from dearmpi.bench.benchmark import BenchmarkSettings
from dearmpi.bench.comparison import Length
from dearmpi.bench.method import Method, Setup, find_missing, read_options
from dearmpi.bench.method_names import METHOD_NAMES, plug_in, read_method
from dearmpi.bench.own_methods import alone, read_config
from dearmpi.bench.process_memory import peak_bytes, start_peak
from dearmpi.bench.replay import ReplayModel
from dearmpi.bench.torch_methods import block_name, blocks_of
from dearmpi.comm.world import World
from dearmpi.config import EngineConfig
from dearmpi.errors import ConfigError
from dearmpi.plan.data.workload import read_workload
from dearmpi.plan.model.profile import profile_workload
from tests.fakes.ranks import run_ranks


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_every_method_is_found_by_its_name(name: str) -> None:
    assert read_method(name).label == name


@pytest.mark.parametrize("name", ["serial", "wfbp", "dear"])
def test_a_row_is_of_the_schedule_that_it_names(alone: World, name: str) -> None:
    method = read_method(f"{name}:2:window=1")
    setup = Setup(alone, nn.Linear(3, 3), lambda params: SGD(params, lr=0.1), method.options)
    entrant = method.enter(setup)
    config = cast(DistributedOptimizer, entrant.optimizer).config
    seen = (config.schedule, config.eager, config.bucket_cap_mb, config.window)
    assert seen == (name, True, 2, 1)
    entrant.close()


def test_a_number_is_the_bucket_cap_and_others_have_names() -> None:
    assert read_method("ddp:8").options == {"cap": "8"}
    assert read_method("dear:2:window=3").options == {"cap": "2", "window": "3"}
    config = read_config({"cap": "2", "window": "3", "eager": "true", "reduce_scatter": "native"})
    expected = EngineConfig(bucket_cap_mb=2, window=3, eager=True, reduce_scatter="native")
    assert config == expected


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("schedule=wfbp", "schedule", "wfbp"),
        ("0.5", "bucket_cap_mb", 0.5),
        ("window=3", "window", 3),
        ("eager=true", "eager", True),
        ("check_every=3", "check_every", 3),
    ],
)
def test_a_setting_is_read_as_what_it_is(text: str, name: str, value: object) -> None:
    config = read_config(read_options([text], label=text))
    assert getattr(config, name) == value and type(getattr(config, name)) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        "deer",
        "dear:",
        "dear:1:2",
        "dear:wide=1",
        "dear:window=many",
        "dear:eager=maybe",
        "dear:-1",
        "bayes:8",
    ],
)
def test_a_method_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        read_method(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ddp:capp=8", "'ddp:capp=8': it has no option capp; it has cap, comm_dtype, view"),
        ("ddp:nan", "'nan'; it must be a number of MiB"),
        ("ddp:1e300", "'1e300'; .* at most 65536"),
        ("ddp:comm_dtype=bf61", "bf61"),
        ("ddp-bf16:view=maybe", "view.*maybe.*true, false"),
        ("ddp-bf16:comm_dtype=fp32", "ddp-bf16 sends bf16"),
        ("ddp-localsgd:period=0", "period is '0'; it must be a whole number, 1 or more"),
        ("ddp-localsgd:cap=8", "no option cap; it has period"),
        ("ddp-powersgd:rank=0", "rank is '0'; it must be a whole number, 1 or more"),
        ("ddp-powersgd:start=1", "start is '1'; it must be a whole number, 2 or more"),
        ("ddp-powersgd:comm_dtype=bf16", "no option comm_dtype; it has cap, rank, start, view"),
        ("fsdp2:8", "no option cap; it has reshard, reuse_pages"),
        ("fsdp2:reshard=maybe", "reshard.*maybe.*true, false"),
        ("fsdp2:reuse_pages=maybe", "reuse_pages.*maybe.*true, false"),
        ("dear:8:bucket_cap_mb=0.1", "twice, as cap=8 and as bucket_cap_mb=0.1"),
        ("dear:window=3.5", "window is '3.5'; it must be a whole number"),
        ("dear:check_every=3.5", "check_every is '3.5'; it must be a whole number"),
        ("dear:bucket_cap_mb=many", "it must be a number"),
        ("dear:eager=maybe", "it must be true or false"),
        ("planned:8", "bucket_cap_mb is 8.0, but the plan decides on it"),
        ("planned:window=3", "window is 3, but the plan"),
        ("wfbp:schedule=dear", "says the schedule; leave schedule=dear out, .*serial, wfbp, dear"),
        ("planned:schedule=dear", "says the schedule"),
        ("bayes:schedule=wfbp", "says the schedule"),
        ("dear:update_on=host", "'dear:update_on=host': update_on is 'host', but .* on the host"),
        ("planned:cuda_buffers=direct", "cuda_buffers is 'direct', but .* on the host"),
    ],
)
def test_wrong_options_are_found_before_anything_is_measured(text: str, words: str) -> None:
    """Not when the method's turn comes, which may be an hour later."""
    with pytest.raises(ConfigError, match=words):
        read_method(text)


@pytest.mark.parametrize("text", ["module", ":factory", "module:"])
def test_a_plug_in_needs_a_module_and_a_factory(text: str) -> None:
    with pytest.raises(ConfigError, match="module:factory"):
        plug_in(text)


@pytest.mark.parametrize(
    ("leaf", "block"),
    [
        ("layer1.0.conv1", "layer1.0"),
        ("bert.encoder.layer.11.attention.self.query", "bert.encoder.layer.11"),
        ("features.denseblock1.denselayer2.conv1", "features.denseblock1.denselayer2"),
        ("fc", "fc"),
    ],
)
def test_blocks_are_numbered_parts_or_parents(leaf: str, block: str) -> None:
    assert block_name(leaf) == block


def test_blocks_leave_tied_layers_to_the_whole_model() -> None:
    workload = read_workload("bert_base")
    model = ReplayModel(profile_workload(workload, feed_forward_s=0, backprop_s=0))
    blocks = blocks_of(model)
    inside = {module for block in blocks for module in block}
    tied = {"bert.embeddings.word_embeddings", "cls.predictions.decoder"}
    outside = {
        name
        for name, module in model.named_modules()
        if module._parameters and module not in inside
    }
    assert outside == tied | {"cls.predictions"}  # which has layers inside it
    assert sum(len(block) for block in blocks) == len(inside)
    assert all(isinstance(module, nn.Module) for module in inside)


@pytest.mark.parametrize(
    "settings",
    [
        {"ratio": 1.0, "feed_forward_s": 1.0, "backprop_s": 1.0},
        {"ratio": 0.0},
        {"ratio": float("nan")},
        {"feed_forward_s": 1.0},
        {"feed_forward_s": 1.0, "backprop_s": -1.0},
        {"batch_size": 0},
    ],
)
def test_a_question_that_contradicts_itself_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        BenchmarkSettings("resnet50", ["dear"], **settings)


@pytest.mark.parametrize("methods", [[], ["alone"], ["dear", "ddp", "dear"]])
def test_methods_must_be_some_and_different(methods: list[str]) -> None:
    with pytest.raises(ConfigError):
        BenchmarkSettings("resnet50", methods).read_methods()


@pytest.mark.parametrize("counts", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_a_length_without_warm_up_or_iterations_is_refused(counts: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError):
        Length(*counts)


def test_the_peak_is_of_what_came_after_the_start() -> None:
    big = bytearray(b"x") * 60_000_000
    del big
    start = start_peak()
    first = peak_bytes(start)
    if first is None:
        pytest.skip("this system does not tell the peak")
    big = bytearray(b"x") * 40_000_000
    del big
    second = peak_bytes(start)
    assert second is not None
    assert first < 20_000_000 < 38_000_000 < second < 55_000_000


def test_a_dtype_for_all_methods_yields_to_their_own() -> None:
    assert read_method("dear:2", comm_dtype="bf16").options == {"comm_dtype": "bf16", "cap": "2"}
    assert read_method("dear:comm_dtype=fp16", comm_dtype="bf16").options == {"comm_dtype": "fp16"}
    assert read_method("ddp", comm_dtype="fp16").options == {"comm_dtype": "fp16"}
    assert read_method("ddp-bf16").comm_dtype == "bf16"
    assert plug_in("mine:make", comm_dtype="bf16").options == {"comm_dtype": "bf16"}
    assert read_config(read_method("wfbp", comm_dtype="bf16").options).comm_dtype == "bf16"


@pytest.mark.parametrize(("text", "comm_dtype"), [("fsdp2", "bf16"), ("ddp-bf16", "fp16")])
def test_a_method_that_cannot_send_so_is_refused(text: str, comm_dtype: Any) -> None:
    with pytest.raises(ConfigError, match=f"{text} is not measured as {comm_dtype} here"):
        read_method(text, comm_dtype=comm_dtype)


def test_what_one_rank_lacks_is_missing_on_all() -> None:
    def rank(world: World) -> tuple[dict[str, str], list[str]]:
        def find(asked: World) -> None:
            if asked.rank == 1:
                raise ImportError("libmine.so: no such file\nand more")

        methods = [Method("mine:make", alone, find=find), Method("other", alone)]
        told: list[str] = []
        return find_missing(world, methods, told.append), told

    problem = "rank 1: ImportError: libmine.so: no such file"
    expected = ({"mine:make": problem}, [f"mine:make is out: {problem}"])
    assert run_ranks(2, rank) == [expected] * 2
