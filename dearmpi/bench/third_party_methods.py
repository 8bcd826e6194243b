"""Third-party methods: Horovod and DeepSpeed, where they are installed.

Each leaves the process to the methods after it: its threads are ended, its groups are gone, and
the environment variables that were set for it are as before.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch.distributed as dist

from dearmpi.bench.method import Entrant, Setup, read_cap, refuse_unknown
from dearmpi.bench.torch_methods import PATIENCE_S
from dearmpi.comm.world import World
from dearmpi.config import check_choice, engine_setting
from dearmpi.errors import ConfigError

HOROVOD_SENDS = ("fp32", "fp16")
_HOROVOD_ADVICE = (
    "build it over this MPI and this torch (HOROVOD_WITH_MPI=1 HOROVOD_WITH_PYTORCH=1 pip install "
    "--no-build-isolation horovod)"
)
_THRESHOLD = "HOROVOD_FUSION_THRESHOLD"
_DEFAULT_THRESHOLD = 128 << 20
_STALL_VARIABLES = ("HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")

_DEEPSPEED_ADVICE = (
    "install it without its kernels (DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed)"
)
_STAGES = ("0", "1", "2")
_FP32_BYTES = 4
_outlived: list[object] = []


def horovod(setup: Setup) -> Entrant:
    """Horovod's DistributedOptimizer over this job's MPI.

    Options: ``cap``, its fusion threshold in MiB, and ``comm_dtype``, fp32 or fp16. Raises
    ImportError on all ranks if it is missing on any, RuntimeError if it is of another MPI.
    """
    variables = horovod_variables(setup.options)
    hvd = find_horovod(setup.world)
    with environment(variables):
        hvd.init()
    try:
        return _enter_horovod(setup, hvd)
    except Exception:
        hvd.shutdown()
        raise


def find_horovod(world: World) -> Any:
    """Horovod itself; raises ImportError on all ranks if it is missing on any (collective)."""
    return find_on_all(world, "horovod", _import_horovod, _HOROVOD_ADVICE)


def _import_horovod() -> Any:
    hvd = import_module("horovod.torch")
    if not hasattr(hvd, "init"):  # without its library it imports all the same
        raise ImportError("it was built without torch")
    if not hvd.mpi_built():
        raise ImportError("it was built without MPI")
    return hvd


def horovod_variables(options: Mapping[str, str]) -> dict[str, str]:
    """The environment variables by which Horovod starts.

    Raises ConfigError for an option that does not exist or fit.
    """
    refuse_unknown(options, ("cap", "comm_dtype"))
    comm_dtype = options.get("comm_dtype", "fp32")
    if comm_dtype not in HOROVOD_SENDS:
        raise ConfigError(
            f"comm_dtype is {comm_dtype!r}; Horovod compresses to fp16, and to nothing else",
            code="method-misfit",
        )
    # A threshold that was once given holds for all later starts in the process unless it is given
    # again: so one is always given, and no method leaves its own to another.
    threshold = os.environ.get(_THRESHOLD, str(_DEFAULT_THRESHOLD))
    if "cap" in options:
        threshold = str(int(read_cap(options["cap"]) * (1 << 20)))
    # Else ranks would wait for one that failed for ever.
    limits = {name: os.environ.get(name, str(int(PATIENCE_S))) for name in _STALL_VARIABLES}
    return {_THRESHOLD: threshold, **limits}


def _enter_horovod(setup: Setup, hvd: Any) -> Entrant:
    size, compression = setup.world.size, hvd.Compression
    if hvd.size() != size:
        raise RuntimeError(
            f"Horovod found {hvd.size()} rank(s) where this job has {size}: it was built over "
            f"another MPI; {_HOROVOD_ADVICE}"
        )
    if not hvd.mpi_threads_supported():
        raise RuntimeError(
            "Horovod calls MPI on a thread of its own, but this MPI was started below "
            "MPI_THREAD_MULTIPLE"
        )
    hvd.broadcast_parameters(setup.model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        setup.make_optimizer(setup.model.parameters()),
        named_parameters=setup.model.named_parameters(),
        compression=compression.fp16
        if setup.options.get("comm_dtype") == "fp16"
        else compression.none,
    )
    return Entrant(setup.model, optimizer, close=hvd.shutdown)


@dataclass(frozen=True, slots=True)
class _EngineSteps:
    """DeepSpeed's engine steps by itself; it clears the gradients as it does."""

    step: Callable[[], Any]
    zero_grad: Callable[[], Any] = lambda: None


def deepspeed(setup: Setup) -> Entrant:
    """DeepSpeed's engine with ZeRO, over gloo.

    Options: ``stage``, 0, 1 (default) or 2; ``cap``, of what is reduced or gathered at once, in
    MiB; ``comm_dtype``, of gradients. Raises ImportError on all ranks if it is missing on any.
    """
    config = deepspeed_config(setup.options)
    package = find_deepspeed(setup.world)
    with environment(_deepspeed_variables(setup.world)):
        _tame(package)
        engine, *_ = package.initialize(
            model=setup.model,
            optimizer=setup.make_optimizer(setup.model.parameters()),
            config=config,
            dist_init_required=False,
        )

    def close() -> None:
        engine.destroy()
        if dist.is_initialized():  # by its own way, so that it forgets its groups as well
            package.comm.destroy_process_group()

    return Entrant(engine, _EngineSteps(engine.step), backward=engine.backward, close=close)


def find_deepspeed(world: World) -> Any:
    """DeepSpeed itself; raises ImportError on all ranks if it is missing on any (collective)."""
    with environment(_deepspeed_variables(world)):
        return find_on_all(
            world, "deepspeed", lambda: import_module("deepspeed"), _DEEPSPEED_ADVICE
        )


def _deepspeed_variables(world: World) -> dict[str, str]:
    """What it looks up; its own launcher would say which rank of the host this is."""
    return {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(world.local_rank)}


def _tame(package: Any) -> None:
    """Keep DeepSpeed from what would disturb other methods, or itself in a later block."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # A kernel of its own for inference, which it would compile for minutes before the first block.
    package.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # It would make a group of its own that waits half an hour for a rank that failed. What is
    # left of a block that failed is never freed, just as in ``leave_group``.
    _outlived.append(package.utils.groups._WORLD_GROUP)
    package.utils.groups._WORLD_GROUP = dist.new_group(timeout=timedelta(seconds=PATIENCE_S))


def deepspeed_config(options: Mapping[str, str]) -> dict[str, Any]:
    """DeepSpeed's configuration. Raises ConfigError for an option that does not exist or fit."""
    refuse_unknown(options, ("cap", "comm_dtype", "stage"))
    stage, comm_dtype = options.get("stage", "1"), options.get("comm_dtype", "fp32")
    check_choice("stage", stage, _STAGES)
    check_choice("comm_dtype", comm_dtype, engine_setting("comm_dtype").choices)
    zero: dict[str, Any] = {"stage": int(stage)}
    if "cap" in options:
        if stage == "0":
            raise ConfigError(
                "ZeRO's stage 0 has no bucket cap; leave it out, or take stage 1",
                code="setting-without-effect",
            )
        elements = int(read_cap(options["cap"]) * (1 << 20)) // _FP32_BYTES
        zero |= {"reduce_bucket_size": elements, "allgather_bucket_size": elements}
    return {
        "train_micro_batch_size_per_gpu": 1,  # only counted
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # else torch's SGD is refused
        "gradient_clipping": 0.0,  # by default 1.0, which no other method does
        "communication_data_type": comm_dtype,
    }


def find_on_all(world: World, name: str, find: Callable[[], Any], advice: str) -> Any:
    """The package that ``find`` imports (collective).

    Raises ImportError on every rank if it is missing on any, so that no rank waits inside it for
    one that does not have it. advice: how to get it.
    """
    found, problem = None, ""
    try:
        found = find()
    except Exception as error:  # one that was built for another torch fails in any way
        lines = str(error).strip().splitlines()
        problem = lines[0] if lines else type(error).__name__
    problems = {rank: text for rank, text in enumerate(world.all_gather_text(problem)) if text}
    if problems:
        rank = min(problems)
        where, who = f"{len(problems)} of {world.size} ranks", f"rank {rank}: "
        if len(problems) == world.size:
            where, who = "any rank", ""
        raise ImportError(
            f"{name} cannot be imported on {where} ({who}{problems[rank]}); {advice}, or leave the "
            "method out"
        )
    return found


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables; at the end they are as before."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
