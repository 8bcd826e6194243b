"""Names that other libraries have lead to those here, and type checkers know which there are.

mypy fails where one of the errors that are ignored here is none.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, get_type_hints

import pytest
import torch
from torch import nn

import dearmpi
from dearmpi import (
    DistributedOptimizer,
    EngineConfig,
    LocalOptimizer,
    SyncBatchNorm,
    World,
    guessed,
)
from dearmpi.comm.backends.alone import AloneCollectives
from dearmpi.config import EngineSettings
from dearmpi.engine.sync.model_tensors import broadcast_parameters
from dearmpi.errors import ArgumentError, ConfigError
from tests.codes import raises

ARGUMENTS = set(EngineConfig.__dataclass_fields__) | set(
    inspect.signature(DistributedOptimizer).parameters
)


def world_of_one() -> World:
    return World(AloneCollectives(), progress="poll")


def wrap(model: nn.Module) -> DistributedOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return DistributedOptimizer(inner, model, world=world_of_one())


TABLES: list[tuple[Mapping[str, str], set[str]]] = [
    (guessed.PACKAGE, set(dearmpi.__all__)),  # dir() has whatever module was imported, too
    (guessed.WORLD, set(dir(World)) | set(vars(world_of_one()))),
    (guessed.OPTIMIZER, set(dir(DistributedOptimizer))),
    (guessed.SETTINGS, ARGUMENTS),
    (guessed.CONNECTION, set(inspect.signature(dearmpi.connect).parameters)),
    (guessed.BROADCAST, set(inspect.signature(broadcast_parameters).parameters)),
    (guessed.LOCAL_SETTINGS, set(inspect.signature(LocalOptimizer).parameters)),
    (guessed.COLLECTIVE, {"values", "value", "op", "buffer", "root"}),
]


@pytest.mark.parametrize(("table", "known"), TABLES)
def test_no_guess_is_a_name_that_there_is(table: Mapping[str, str], known: set[str]) -> None:
    assert not table.keys() & known


def test_all_answers_name_what_there_is() -> None:
    answers = {answer for table, _ in TABLES for answer in table.values()}
    assert len(answers) > 40
    optimizer = wrap(nn.Linear(2, 2))
    homes = {"dearmpi": dearmpi, "world": optimizer.world, "optimizer": optimizer}
    for answer in answers:
        for home, name in re.findall(r"\b(dearmpi|world|optimizer)\.([a-zA-Z_]+)", answer):
            is_module = home == "dearmpi" and find_spec(f"dearmpi.{name}")
            assert is_module or hasattr(homes[home], name), answer


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("init", r"no init: call world = dearmpi.connect\(\)"),
        ("rank", "no rank: with world = .*, it is world.rank$"),
        ("local_rank", "world.local_rank$"),
        ("replicate", r"dearmpi.DistributedOptimizer\(optimizer, model\)"),
        ("allreduce", r"world.mean\(x\) for an average, or all_reduce"),
        ("broadcast_object", r"world.broadcast_object\(x\)"),
        ("broadcast_optimizer_state", r"every rank load the state, by the load_state_dict\(\)"),
        ("MismatchError", "import it from dearmpi.errors"),
        ("nccl_built", "run dear-train doctor"),
        ("push_pull", "backward and step.. exchange the gradients"),
        ("Fabric", r"call world = dearmpi.connect\(\), and wrap the optimizer"),
        ("start_timeline", "set DEAR_TRACE=START:STOP"),
        ("save", "or use dearmpi.Run"),
        ("conect", "no conect; did you mean 'connect'?"),
    ],
)
def test_a_guessed_attribute_of_the_package(name: str, told: str) -> None:
    with pytest.raises(AttributeError, match=told):
        getattr(dearmpi, name)
    assert not hasattr(dearmpi, name) and getattr(dearmpi, name, 3) == 3


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ("local_steps num_inner_steps inner_steps period", "sync_every=50"),
        ("fragment_sync_delay", "delay=5"),
        ("fragment_update_alpha", "mix=0.5"),
        ("should_quantize", 'compress="int4"'),
        ("model_fragments", "fragments=8"),
        ("outer_optimizer", "outer_lr=0.7 and outer_momentum=0.8"),
        ("warmup_steps", "sync_after=1000"),
        ("inner_optimizer", "the first argument"),
        ("manager backup_device pin_memory use_bucketization bucket_cap_mb", "leave it out"),
    ],
)
def test_arguments_of_other_diloco_are_answered(others: str, told: str) -> None:
    """torchft's, OpenDiLoCo's and those of torch's PeriodicModelAverager."""
    model = nn.Linear(2, 2)
    for other in others.split():
        given: dict[str, Any] = {other: 3}
        with raises(ArgumentError, "unknown-argument", other, told):
            LocalOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, **given)


def test_an_attribute_that_there_is_not_is_an_error_for_type_checkers() -> None:
    with pytest.raises(AttributeError, match="dearmpi has no nope; known: AucLoss"):
        dearmpi.nope()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="module 'dearmpi' has no attribute '__nope__'"):
        dearmpi.__nope__()  # type: ignore[attr-defined]


def test_a_guessed_attribute_of_the_optimizer() -> None:
    optimizer = wrap(nn.Linear(2, 2))
    with pytest.raises(AttributeError, match=r"call optimizer.clip_grad_norm_\(max_norm\)"):
        optimizer.clip_grad_norm(1.0)  # type: ignore[attr-defined]
    for name, told in {
        "get_global_grad_norm": "what optimizer.clip_grad_norm_.max_norm. returns",
        "unscale_": "use dearmpi.GradScaler",
        "register_comm_hook": 'comm_dtype="bf16"',
        "save_checkpoint": "what optimizer.state_dict.. returns on every rank",
        "is_gradient_accumulation_boundary": "with optimizer.no_sync",
        "flush": "call optimizer.synchronize",
    }.items():
        with pytest.raises(AttributeError, match=f"DistributedOptimizer has no {name}: .*{told}"):
            getattr(optimizer, name)
    with pytest.raises(AttributeError, match="object has no attribute 'nope'"):
        optimizer.nope()  # type: ignore[attr-defined]
    assert not hasattr(optimizer, "backward") and getattr(optimizer, "module", 3) == 3


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Get_rank", "it is world.rank$"),
        ("get_world_size", "it is world.size$"),
        ("allreduce", r"call world.mean\(x\) for an average, or all_reduce\(values, op\)"),
        ("bcast", r"call world.broadcast_object\(x, root=0\)"),
        ("allgather", r"call world.all_gather_object\(x\)"),
        ("Barrier", r"call world.barrier\(\)"),
        ("is_main_process", "it is world.is_root"),
        ("Split", r"world.split\(color\)"),
        ("cross_size", "follows from world.hosts"),
        ("is_local_main_process", "it is world.local_rank == 0"),
        ("local_world_size", "world.hosts.count"),
        ("backend", "a world speaks MPI"),
        ("Finalize", "the job ends with its scripts"),
    ],
)
def test_a_guessed_attribute_of_the_world(name: str, told: str) -> None:
    world = world_of_one()
    with pytest.raises(AttributeError, match=f"World has no {name}: .*{told}"):
        getattr(world, name)
    with pytest.raises(AttributeError, match="'World' object has no attribute 'nope'"):
        world.nope()  # type: ignore[attr-defined]
    assert not hasattr(world, name) and getattr(world, name, 3) == 3


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("named_parameters", r"give the model itself: DistributedOptimizer\(optimizer, model\)"),
        ("root_rank", "copies rank 0's parameters and buffers to all ranks"),
        ("average", "gradients are averaged"),
        ("op", "gradients are averaged"),
        ("compression", 'comm_dtype="bf16", or "fp16", sends half the bytes'),
        ("zero_quantized_weights", 'compress="int8"'),
        ("backward_passes_per_step", r"with optimizer.no_sync\(\): around"),
        ("process_group", "it is world= here"),
        ("device_ids", "move the model to its device"),
        ("find_unused_parameters", "unused parameters"),
        ("gradient_as_bucket_view", "leave it out"),
        ("broadcast_buffers", 'buffers="broadcast"'),
        ("forward_sync_buffers", 'buffers="broadcast"'),
        ("communication_data_type", 'comm_dtype="bf16"'),
        ("cpu_offload", 'update_on="host"'),
        ("gradient_clipping", "clip_grad_norm_"),
        ("world_size", "the launcher, such as mpirun -n 4, decides"),
        ("bucket_cap_mb_list", "bucket_cap_mb=4"),
    ],
)
def test_a_guessed_argument_is_answered_before_others_are_missed(name: str, told: str) -> None:
    inner = torch.optim.SGD(nn.Linear(2, 2).parameters())
    given: dict[str, Any] = {name: None}
    for kind in (TypeError, ConfigError):
        with pytest.raises(kind, match=f"DistributedOptimizer has no argument {name}: .*{told}"):
            DistributedOptimizer(inner, **given)


def test_a_misspelt_setting_is_an_error_for_type_checkers() -> None:
    model = nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters())
    with pytest.raises(TypeError, match=r"unknown setting shedule \(did you mean schedule\?\)"):
        DistributedOptimizer(inner, model, world=world_of_one(), shedule="x")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="gather is 'all'"):
        DistributedOptimizer(inner, model, gather="all")  # type: ignore[arg-type]


def test_settings_for_type_checkers_are_the_fields_of_the_config() -> None:
    assert get_type_hints(EngineSettings) == get_type_hints(EngineConfig)
    assert not EngineSettings.__required_keys__


def test_arguments_of_the_launcher_and_of_broadcasts_are_answered() -> None:
    with pytest.raises(TypeError, match="connect has no argument backend: .*the launcher"):
        dearmpi.connect(backend="mpi")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="broadcast_parameters has no argument root_rank: it is r"):
        dearmpi.broadcast_parameters(nn.Linear(2, 2), root_rank=0)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"type OrderedDict, .* and not its state_dict\(\)"):
        dearmpi.broadcast_parameters(nn.Linear(2, 2).state_dict())  # type: ignore[arg-type]


def test_arguments_of_the_worlds_calls_are_answered() -> None:
    world = world_of_one()
    calls: tuple[tuple[Any, dict[str, Any], str], ...] = (
        (world.all_reduce, {"average": True}, r"call world.mean\(x\)"),
        (world.mean, {"group": None}, "groups of ranks are worlds"),
        (world.broadcast_object, {"root_rank": 0}, "it is root= in world.broadcast"),
        (world.broadcast, {"src": 0}, "it is root= in world.broadcast"),
        (world.all_gather_object, {"obj": 1}, "give what is exchanged as the first"),
        (world.all_gather, {"tensor": 1}, "give what is exchanged as the first"),
        (world.barrier, {"async_op": True}, "leave it out"),
    )
    for call, given, told in calls:
        (name,) = given
        with pytest.raises(
            TypeError, match=f"world.{call.__name__} has no argument {name}: {told}"
        ):
            call(1, **given)


def test_the_world_may_be_left_out_everywhere() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    dearmpi.broadcast_parameters(model)
    dearmpi.broadcast_buffers(model)
    converted = SyncBatchNorm.convert_sync_batchnorm(model)
    assert isinstance(converted[1], SyncBatchNorm)  # type: ignore[index]
    DistributedOptimizer(torch.optim.SGD(model.parameters()), model).close()
