"""The choice of a route from a device's memory to MPI, and of the algorithms on it, alike on all
ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from dearmpi.comm.algorithms.registry import (
    CollectiveAlgorithms,
    select_grid,
    select_reduce_scatter,
)
from dearmpi.comm.world import World
from dearmpi.config import CudaBuffers, EngineConfig, ReduceScatter
from dearmpi.cuts import even_cuts
from dearmpi.device.accelerator import Device, device_of, zeros
from dearmpi.device.comm_stream import CommStream, DeviceCommStream, HostCommStream
from dearmpi.device.routes import (
    NUM_AHEAD,
    AloneDeviceCollectives,
    DirectCollectives,
    StagedCollectives,
)
from dearmpi.errors import ConfigError, MismatchError
from dearmpi.plan.data.layout import BucketLayout
from dearmpi.tune.device_probe import (
    ALL_GATHER,
    OPERATIONS,
    ProbeVerdict,
    known_verdicts,
    share_verdicts,
)
from dearmpi.tune.topology import settle_topology

_HOST = "the host"


@dataclass(frozen=True, slots=True)
class Route:
    """direct: MPI gets device memory; else copies go by pinned host memory. reason: why."""

    direct: bool
    reason: str

    def __str__(self) -> str:
        return f"{'direct' if self.direct else 'staged'} ({self.reason})"


def choose_route(
    asked: CudaBuffers,
    reduce_scatter: ReduceScatter | Literal["auto"],
    verdicts: Sequence[ProbeVerdict],
    *,
    num_hosts: int = 1,
) -> Route:
    """The route for tensors of a device. verdicts: of MPI on device memory; none if not tried.

    They are of one host. Between hosts ``auto`` stages, since an MPI that fails there may end the
    job late; with an MPI that is known to work, ask for direct.

    Raises ConfigError, with what the trial printed, if direct is asked for and does not work.
    """
    if asked == "staged":
        return Route(False, "as asked")
    if not verdicts:
        if asked == "direct":
            raise ConfigError(
                "cuda_buffers is 'direct', but MPI was not tried on device memory: call "
                "dearmpi.probe_devices() before dearmpi.connect(), or use 'staged'",
                code="devices-not-probed",
            )
        return Route(False, "MPI was not tried on device memory")
    needed = _needed(reduce_scatter)
    broken = [v for v in verdicts if v.operation in needed and not v.works]
    if not broken and asked == "auto" and num_hosts > 1:
        return Route(False, f"MPI was tried on device memory within one of {num_hosts} hosts")
    if not broken:
        return Route(True, f"MPI did {' and '.join(needed)} on device memory in a trial")
    names = ", ".join(verdict.operation for verdict in broken)
    said = f"in a trial MPI did not do {names} on device memory"
    if asked == "direct":
        works = [verdict.operation for verdict in verdicts if verdict.works]
        raise ConfigError(
            f"cuda_buffers is 'direct', but {said} (it did {', '.join(works) or 'nothing'}); use "
            f"'staged', or an MPI that was built for CUDA. The trial printed:\n{broken[0].output}",
            code="no-direct-cuda-buffers",
        )
    return Route(False, said)


def _needed(reduce_scatter: ReduceScatter | Literal["auto"]) -> tuple[str, ...]:
    """Of the operations that were tried, those that training does with this reduce-scatter."""
    if reduce_scatter == "auto":
        return OPERATIONS
    # Only the library's own all-gather was tried by itself: a ring gathers by the same sends and
    # receives as it reduces.
    gather = CollectiveAlgorithms(reduce_scatter).all_gather
    return tuple(dict.fromkeys((ALL_GATHER if gather == "native" else gather, reduce_scatter)))


def open_comm_stream(
    params: Iterable[nn.Parameter], *, world: World, layout: BucketLayout, config: EngineConfig
) -> CommStream:
    """The communication stream of the device that holds ``params`` (collective).

    Raises ConfigError for a route that cannot be had.
    """
    device = device_of(params)
    if device is None:
        return HostCommStream()
    verdicts = share_verdicts(world, known_verdicts())
    num_hosts = len(set(world.hosts))
    route = choose_route(config.cuda_buffers, config.reduce_scatter, verdicts, num_hosts=num_hosts)
    wrap: Any = partial(DirectCollectives, window=config.window)
    if world.size == 1:
        wrap = partial(AloneDeviceCollectives, window=config.window)
        return DeviceCommStream(device, wrap, name="not at all: one rank sends nothing")
    if route.direct:
        return DeviceCommStream(device, wrap, name=str(route))
    most_bytes = max(bucket.nbytes for bucket in layout)
    wrap = partial(StagedCollectives, window=config.window, most_bytes=most_bytes)
    return DeviceCommStream(device, wrap, name=str(route), num_ahead=NUM_AHEAD)


def choose_algorithms(
    world: World,
    layout: BucketLayout,
    params: Mapping[str, Tensor],
    *,
    config: EngineConfig,
    comm_stream: CommStream,
    grid_choice: str = "",
) -> CollectiveAlgorithms:
    """The algorithms that the settings ask for, or those that are fastest on the way that gradients
    take (collective). ``params``: by name. grid_choice: as ``check_routes`` says.
    """
    wire_dtype = config.wire_dtype if world.size > 1 else None  # one rank rounds nothing
    largest = max(layout, key=lambda bucket: (bucket.trained, bucket.nbytes))

    def make_buffer() -> Tensor:
        """Not its own buffer, which it may never need."""
        numel = even_cuts(largest.numel, world.size).total
        made = zeros(numel, params[largest.names[0]])
        comm_stream.wait_for_current()  # it is new
        return made

    if config.reduce_scatter != "auto":
        grid, found = select_grid(world, config, make_buffer, wrap=comm_stream.wrap_for_device)
        return CollectiveAlgorithms(config.reduce_scatter, wire_dtype, grid, found or grid_choice)
    # Of half precision MPI has no portable sum, of torch's complex numbers none that is asked for.
    dtypes = {placed.spec.dtype for bucket in layout for placed in bucket.placements}
    fastest = select_reduce_scatter(
        world,
        make_buffer(),
        wire_dtype=config.wire_dtype,
        library_can_add=dtypes <= {"float32", "float64"},
        wrap=comm_stream.wrap_for_device,
    )
    return CollectiveAlgorithms(fastest, wire_dtype)


def check_routes(
    world: World, params: Collection[nn.Parameter], *, config: EngineConfig
) -> tuple[EngineConfig, str]:
    """``config``, with its topology settled as by ``settle_topology``, and what for, in words
    (collective).

    Raises MismatchError unless all ranks have their parameters on one kind of device, and a file of
    the topology or none. Raises ConfigError unless this rank has them on one that can be served,
    and what ``config`` says of devices has an effect.
    """
    model_bytes = sum(param.numel() * param.element_size() for param in params)
    bucket_bytes = min(model_bytes, config.cap_bytes(model_bytes, world_size=world.size))
    device = device_of(params)
    name = _HOST if device is None else device.name
    told = [text.split("\n", 1) for text in world.all_gather_text(f"{name}\n{config.topology}")]
    seen, topologies = [names for names, _ in told], [topology for _, topology in told]
    _compare_files(world, topologies)
    config, grid_choice = settle_topology(world, config, num_bytes=bucket_bytes)
    for rank, name in enumerate(seen):
        if (name == _HOST) != (seen[0] == _HOST):
            raise MismatchError(
                f"rank {rank} on {world.hosts[rank]} has its parameters on {name}, rank 0 on "
                f"{world.hosts[0]} on {seen[0]}; train on devices everywhere, or nowhere",
                code="ranks-differ-in-devices",
            )
    if device is not None:
        _check_threads(world, device)
        return config, grid_choice
    for name, value, default in (
        ("cuda_buffers", config.cuda_buffers, "auto"),
        ("update_on", config.update_on, "device"),
    ):
        if value != default:
            raise ConfigError(
                f"{name} is {value!r}, but the parameters are on the host, where it has no effect; "
                "leave it out, or move the model to a device first",
                code="setting-without-effect",
            )
    return config, grid_choice


def _compare_files(world: World, topologies: Sequence[str]) -> None:
    """Raise MismatchError where some ranks would compare a file that others do not read."""
    is_file = [EngineConfig(topology=one).topology_file is not None for one in topologies]
    for rank, topology in enumerate(topologies):
        if is_file[rank] != is_file[0]:
            raise MismatchError(
                f"rank {rank} on {world.hosts[rank]} has topology {topology!r}, rank 0 on "
                f"{world.hosts[0]} {topologies[0]!r}; give every rank the same",
                code="ranks-differ-in-topology",
            )


def _check_threads(world: World, device: Device) -> None:
    """Raise ConfigError where autograd's thread for the device would drive MPI and may not."""
    if world.size > 1 and not world.serves_any_thread:
        raise ConfigError(
            f"the parameters are on {device.name}, whose gradients come on a thread of autograd's "
            "own, but MPI gives less than MPI_THREAD_SERIALIZED: only the main thread may call it; "
            "use an MPI with MPI_THREAD_MULTIPLE, and leave MPI4PY_RC_THREADS and "
            "MPI4PY_RC_THREAD_LEVEL unset",
            code="mpi-lacks-threads",
        )
