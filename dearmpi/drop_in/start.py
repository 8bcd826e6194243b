"""``python -m dearmpi [options] SCRIPT [arguments]``: the script finds torch's names served.

Torch's names become dearmpi's, and the ranks get torchrun's variables.
"""

from __future__ import annotations

import argparse
import gc
import os
import runpy
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any, NoReturn, get_args

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

import dearmpi
from dearmpi import World
from dearmpi.config import CommDtype, Compress, EngineConfig, Gather, ScheduleName
from dearmpi.drop_in.served_optimizer import KnownOptimizers
from dearmpi.drop_in.serving import Chosen
from dearmpi.drop_in.spawning import spawn
from dearmpi.drop_in.wrapper import DistributedDataParallel
from dearmpi.errors import ConfigError, DearError, LaunchError

_USAGE = "mpirun -n N python -m dearmpi [options] (SCRIPT | -m MODULE) [arguments of the script]"
_EPILOG = "Options before SCRIPT are dearmpi's; all that follows is the script's."
_LOOPBACK = "127.0.0.1"
_CURE = "set MASTER_ADDR to an address of rank 0's host that all hosts reach"


def main(given: Sequence[str], *, report: Callable[[DearError], None]) -> int:
    """Run the script that ``given`` names, as Python would; returns the exit status.

    report: called where the command line is wrong, or the ranks cannot connect.
    """
    try:
        options, target = _parse(given)
        choices = EngineConfig(
            schedule=options.schedule,
            gather=options.gather,
            comm_dtype=options.comm_dtype,
            compress=options.compress,
        )
        world = serve_scripts(choices)
    except (LaunchError, ConfigError) as error:
        report(error)
        return error.exit_code
    if world.is_root and world.size > 1:
        _tell_of_training_alone(target[0], world.size)
    sys.argv = list(target)
    if options.m:
        sys.path[0] = os.getcwd()
        runpy.run_module(target[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(target[0]))
        runpy.run_path(target[0], run_name="__main__")
    return 0


class _Parser(argparse.ArgumentParser):
    """Raises what is wrong, so that one rank can report it for all."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help", code="unknown-command")


def _parse(given: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Options, and the script or module with its own arguments.

    Raises ConfigError for a wrong option, or a script that is not there.
    """
    parser = _Parser(
        prog="python -m dearmpi",
        usage=_USAGE,
        description="Run a script written for DistributedDataParallel, with dearmpi in its place.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    default = Chosen.choices
    for flag, choices, value, about in (
        ("--schedule", get_args(ScheduleName), default.schedule, "when collectives travel"),
        ("--gather", get_args(Gather), default.gather, "what is gathered after each step"),
        ("--comm-dtype", get_args(CommDtype), default.comm_dtype, "precision on the wire"),
        ("--compress", get_args(Compress), default.compress, "what large buckets travel as"),
    ):
        parser.add_argument(flag, choices=choices, default=value, help=f"{about}; default: {value}")
    parser.add_argument("-m", action="store_true", help="run a module, as python -m does")
    parser.add_argument("target", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if not options.target:
        parser.error("name a script, or a module after -m")
    script = options.target[0]
    if not os.path.exists(script) and not options.m:
        raise ConfigError(
            f"there is no script {script!r} in {os.getcwd()}; give a path that every host has",
            code="file-missing",
        )
    return options, options.target


def serve_scripts(choices: EngineConfig) -> World:
    """Connect, set the variables of the ranks and replace torch's names.

    Collective the first time. choices: for every model that is wrapped from now on.
    """
    world = dearmpi.connect()
    if not Chosen.is_served:
        announce_ranks(world)
    replace_in_torch()
    Chosen.choices, Chosen.is_served = choices, True
    return world


def _tell_of_training_alone(script: str, size: int) -> None:
    """Say so where an optimizer steps, and the script has neither wrapped a model nor used an
    optimizer of dearmpi: each rank then trains a model of its own.
    """

    has_looked = False

    def look(optimizer: Optimizer, args: object, kwargs: object) -> None:
        nonlocal has_looked
        if has_looked:
            return
        has_looked = True
        own = (dearmpi.DistributedOptimizer, dearmpi.LocalOptimizer)
        # Once in a process, and only where no model is wrapped.
        if not KnownOptimizers.models and not any(isinstance(o, own) for o in gc.get_objects()):
            print(
                f"dearmpi: warning: {script} trains without DistributedDataParallel, so each of "
                f"the {size} ranks trains a model of its own; wrap the model, or start one process",
                file=sys.stderr,
                flush=True,
            )

    register_optimizer_step_post_hook(look)


def announce_ranks(world: World) -> None:
    """Set RANK, WORLD_SIZE and their like, for the script's own torch.distributed (collective).

    Frameworks prefer TORCHELASTIC_RUN_ID to the variables of MPI and SLURM. Without an accelerator,
    ACCELERATE_USE_CPU has accelerate see the ranks as well.

    MASTER_ADDR and MASTER_PORT are rank 0's, if it has them; else its address and a free port.
    Raises ConfigError where no other host can reach rank 0's.
    """
    hosts = list(dict.fromkeys(world.hosts))
    on_one_host = len(hosts) == 1
    place = world.broadcast_object(_choose_place(on_one_host) if world.is_root else None)
    if isinstance(place, str):
        raise ConfigError(place, code="address-not-reached")
    address, port = place
    os.environ.update(
        RANK=str(world.rank),
        WORLD_SIZE=str(world.size),
        LOCAL_RANK=str(world.local_rank),
        LOCAL_WORLD_SIZE=str(world.hosts.count(world.host)),
        GROUP_RANK=str(hosts.index(world.host)),
        GROUP_WORLD_SIZE=str(len(hosts)),
        TORCHELASTIC_RUN_ID="dearmpi",
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
    )
    if not torch.accelerator.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    if on_one_host:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _choose_place(on_one_host: bool) -> tuple[str, int] | str:
    """Address and port, or why there is none."""
    address = os.environ.get("MASTER_ADDR") or (_LOOPBACK if on_one_host else "")
    if not address:
        name = socket.gethostname()
        try:
            address = socket.gethostbyname(name)
        except OSError as error:
            return f"{name} does not know its own address ({error}); {_CURE}"
        if address.startswith("127."):
            return f"{name} knows itself as {address} only; {_CURE}"
    named = os.environ.get("MASTER_PORT", "")
    return address, int(named) if named.isdigit() else _free_port()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def replace_in_torch() -> None:
    """Have scripts find what is dearmpi's where they look for torch's, or have done so."""
    for places, name, replacement in (
        (
            ("torch.nn.parallel", "torch.nn.parallel.distributed"),
            "DistributedDataParallel",
            DistributedDataParallel,
        ),
        (
            ("torch.nn", "torch.nn.modules", "torch.nn.modules.batchnorm"),
            "SyncBatchNorm",
            SyncBatchNorm,
        ),
        (
            ("torch.distributed.optim", "torch.distributed.optim.zero_redundancy_optimizer"),
            "ZeroRedundancyOptimizer",
            ZeroRedundancyOptimizer,
        ),
        (("torch.multiprocessing",), "spawn", spawn),
    ):
        torchs = getattr(import_module(places[0]), name)
        for place in places:
            setattr(import_module(place), name, replacement)
        if torchs is not replacement:
            _replace_in_loaded(torchs, replacement)


def _replace_in_loaded(torchs: object, replacement: object) -> None:
    """In modules that have imported the name before; torch's own need what they hold."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("torch", "dearmpi"):
            continue
        held = getattr(module, "__dict__", {})
        for key in [key for key, value in list(held.items()) if value is torchs]:
            held[key] = replacement


class _AsServed(type(nn.Module)):  # type: ignore[misc]
    """Of a name whose layers are made by ``dearmpi.convert_sync_batchnorm`` as well."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, dearmpi.SyncBatchNorm)


class SyncBatchNorm(dearmpi.SyncBatchNorm, metaclass=_AsServed):
    """torch's SyncBatchNorm by its interface; statistics of all ranks travel over MPI."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """``process_group``: of all ranks."""
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """The module with batch normalisations over all ranks."""
        return dearmpi.convert_sync_batchnorm(module)


class ZeroRedundancyOptimizer:
    """torch's, of which nothing is left but the optimizer that it wraps."""

    def __new__(  # type: ignore[misc]
        cls,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        process_group: Any = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> Optimizer:
        """An ``optimizer_class`` with ``defaults``, whose state each rank has whole."""
        optimizer: Any = optimizer_class(params, **defaults)
        optimizer.consolidate_state_dict = _is_consolidated
        made: Optimizer = optimizer
        return made


def _is_consolidated(to: int = 0) -> None:
    """Each rank has the whole state at any time."""
