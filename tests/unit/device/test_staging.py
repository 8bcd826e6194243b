"""Staging: what the host waits for, what it never does, and how much memory is pinned."""

from __future__ import annotations

import threading
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from dearmpi import DistributedOptimizer
from dearmpi.comm.backends.alone import AloneCollectives
from dearmpi.comm.world import World
from dearmpi.config import CudaBuffers, ReduceScatter
from dearmpi.cuts import Cuts
from dearmpi.device.accelerator import device_of, zeros
from dearmpi.device.comm_stream import DeviceCommStream
from dearmpi.device.route_choice import choose_route
from dearmpi.device.routes import AloneDeviceCollectives
from dearmpi.errors import ConfigError, DeviceError, MismatchError
from dearmpi.tune.device_probe import OPERATIONS, ProbeVerdict
from tests.codes import raises
from tests.fakes import FakeHub
from tests.fakes.ranks import run_ranks
from tests.lazy_device import HostStream, LazyDevice, NotYetError, put_on
from tests.unit.engine.chain import Chain, name_of_bucket
from tests.unit.engine.device_rank import SIZE, WINDOW, Rank


def finish(requests: list[Any], *, most_polls: int = 1000) -> None:
    left = list(requests)
    for _ in range(most_polls):
        left = [request for request in left if not request.test()]
    assert not left


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dearmpi.device.routes.CHUNK_BYTES", 32)


def test_chunks_make_the_same_sum_and_pinned_memory_does_not_grow(small_chunks: None) -> None:
    hub = FakeHub(SIZE)
    ranks = [Rank(hub, rank) for rank in range(SIZE)]
    buffers = [torch.arange(200.0) * (rank + 1) for rank in range(SIZE)]
    requests = [
        one.collectives.start_reduce_scatter(buffer, "ring")
        for one, buffer in zip(ranks, buffers, strict=True)
    ]
    finish(requests)
    shards = [ranks[0].values(buffers[0][:100]), ranks[1].values(buffers[1][100:])]
    assert shards[0] + shards[1] == [3.0 * value for value in range(200)]
    assert [one.device.pinned_bytes for one in ranks] == [(WINDOW + 2) * 32] * SIZE
    assert max(hub.most_in_flight.values()) <= WINDOW


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("ends", [(0, 37), (0, 0), (0, 100), (0, 3)])
def test_uneven_shards_go_in_chunks_of_all_of_them(
    ends: tuple[int, int], direct: bool, small_chunks: None
) -> None:
    hub, cuts = FakeHub(SIZE), Cuts((*ends, 100))
    ranks = [Rank(hub, rank, direct=direct) for rank in range(SIZE)]
    buffers = [torch.arange(100.0) * (rank + 1) for rank in range(SIZE)]
    pairs = list(zip(ranks, buffers, strict=True))
    finish([one.collectives.start_reduce_scatter(b, "ring", cuts=cuts) for one, b in pairs])
    sums = [3.0 * value for value in range(100)]
    for rank, (one, buffer) in enumerate(pairs):
        assert one.values(buffer[cuts.slice_of(rank)]) == sums[cuts.slice_of(rank)]
    finish([one.collectives.start_all_gather(b, cuts=cuts) for one, b in pairs])
    assert all(one.values(buffer) == sums for one, buffer in pairs)


@pytest.mark.parametrize("direct", [False, True])
def test_operations_start_in_the_order_asked_for_whichever_device_is_ready_first(
    direct: bool,
) -> None:
    """One rank's first buffer is ready late; its second must not overtake it on the network."""
    hub = FakeHub(SIZE, name=lambda buffer: str(buffer.numel()))
    ranks = [Rank(hub, rank, direct=direct) for rank in range(SIZE)]
    late = HostStream()
    late.is_open = False
    buffers = [[torch.ones(4), torch.ones(6)] for _ in ranks]
    ranks[0].comm_stream.written(buffers[0][0], [late])
    ranks[0].comm_stream.written(buffers[0][1], [HostStream()])
    requests = [
        one.collectives.start_all_gather(buffer)
        for one, mine in zip(ranks, buffers, strict=True)
        for buffer in mine
    ]
    for _ in range(20):
        for request in requests:
            assert not request.test()
    assert hub.picture(0) == ""  # nothing of what is not written yet was given to MPI
    late.is_open = True
    finish(requests)
    assert hub.picture(0) == hub.picture(1) == "AG4 AG6"


def test_a_whole_buffer_goes_both_ways_and_half_precision_is_passed_on(small_chunks: None) -> None:
    hub = FakeHub(SIZE)
    ranks = [Rank(hub, rank) for rank in range(SIZE)]
    total = [torch.full((20,), 1.0 + rank) for rank in range(SIZE)]
    finish(
        [one.collectives.start_all_reduce(b, "sum") for one, b in zip(ranks, total, strict=True)]
    )
    assert ranks[1].values(total[1]) == [3.0] * 20
    told = [torch.full((20,), 1.0 + rank) for rank in range(SIZE)]
    finish([one.collectives.start_broadcast(b, 1) for one, b in zip(ranks, told, strict=True)])
    assert ranks[0].values(told[0]) == [2.0] * 20
    fine = 1.0 + 2.0**-12
    rounded = [torch.full((20,), fine) for _ in range(SIZE)]
    finish(
        [
            one.collectives.start_all_gather(b, wire_dtype="bf16")
            for one, b in zip(ranks, rounded, strict=True)
        ]
    )
    assert ranks[0].values(rounded[0]) == [1.0] * 20


def test_one_rank_copies_nothing_and_waits_for_gradients() -> None:
    device, late, gradients = LazyDevice(), HostStream(), torch.ones(4)
    comm_stream = DeviceCommStream(device, wrap=None)
    collectives = AloneDeviceCollectives(AloneCollectives(), comm_stream, window=WINDOW)
    late.is_open = False
    comm_stream.written(gradients, [late])
    assert collectives.start_reduce_scatter(gradients, "ring").test()
    with pytest.raises(NotYetError), comm_stream.running():
        pass
    late.is_open = True
    with comm_stream.running():
        assert device.num_copies == 0


def distribute(world: World, **settings: Any) -> tuple[Chain, DistributedOptimizer]:
    model = Chain(2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"bucket_cap_mb": 1e-6, **settings}
    return model, DistributedOptimizer(inner, model, world=world, **settings)


@pytest.mark.parametrize("update_on", ["device", "host"])
@pytest.mark.parametrize("eager", [False, True])
def test_the_host_goes_on_while_the_device_is_behind(
    eager: bool, update_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward and step return though no kernel has run; until one has, nothing is sent."""
    device = LazyDevice()
    put_on(monkeypatch, device)
    hub = FakeHub(SIZE, name=name_of_bucket(SIZE, 2))
    pictures = []

    def rank(world: World) -> list[Tensor]:
        model, optimizer = distribute(world, eager=eager, update_on=update_on)
        world.barrier()
        device.host.is_open = False
        world.barrier()
        model.backward()
        optimizer.step()
        pictures.append([text for text in hub.picture(world.rank).split() if text != "AR"])
        world.barrier()
        device.host.is_open = True
        optimizer.synchronize()
        values = [param.detach().clone() for param in model.parameters()]
        optimizer.close()
        return values

    found = run_ranks(SIZE, rank, hub=hub)
    assert not any("RS0" in picture or "RS1" in picture for picture in pictures)
    model = Chain(2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    model.backward()
    inner.step()
    for values in found:
        for value, param in zip(values, model.parameters(), strict=True):
            torch.testing.assert_close(value, param.detach())


@pytest.mark.parametrize("direct", [False, True])
def test_the_device_is_that_of_the_thread_before_the_thread_asks_for_anything(
    direct: bool,
) -> None:
    """Else each rank would have a context on device 0, and MPI none on the one that it is given."""
    one, asked = Rank(FakeHub(SIZE), 0, direct=direct), list[bool]()

    class Asked(HostStream):
        def query(self) -> bool:
            asked.append(threading.get_ident() in one.device.threads)
            return True

    buffer = torch.ones(4)
    one.comm_stream.written(buffer, [Asked()])
    thread = threading.Thread(target=one.collectives.start_all_gather, args=(buffer,))
    thread.start()
    thread.join()
    assert thread.ident in one.device.threads
    assert all(asked) and bool(asked) == direct


def test_ranks_on_different_kinds_of_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "dearmpi.device.route_choice.device_of",
        lambda params: LazyDevice() if threading.current_thread().name == "rank-1" else None,
    )
    with raises(MismatchError, "ranks-differ-in-devices", "rank 1", "lazy:0", "rank 0"):
        run_ranks(SIZE, lambda world: distribute(world)[1].close())


def test_an_mpi_for_the_main_thread_only_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a device, autograd hands gradients over, and polls, on a thread of its own."""

    def rank(world: World) -> None:
        world.serves_any_thread = False
        distribute(world)[1].close()

    run_ranks(SIZE, rank, progress="poll")
    put_on(monkeypatch, LazyDevice())
    run_ranks(1, rank, progress="poll")
    with raises(ConfigError, "mpi-lacks-threads", "lazy:0", "MPI", "MPI_THREAD_SERIALIZED"):
        run_ranks(SIZE, rank, progress="poll")


def test_parameters_on_several_devices_are_refused() -> None:
    params = [torch.nn.Parameter(torch.ones(2, device=device)) for device in ("cpu", "meta")]
    with raises(ConfigError, "several-devices", "cpu", "meta"):
        device_of(params)
    with raises(ConfigError, "device-not-served", "meta"):
        device_of(params[1:])


WORKS = [ProbeVerdict(operation, works=True) for operation in OPERATIONS]
ONLY_RING = [ProbeVerdict(v.operation, works=v.operation == "ring") for v in WORKS]
NO_RING = [
    ProbeVerdict(v.operation, works=v.operation != "ring", output="Segmentation fault")
    for v in WORKS
]


@pytest.mark.parametrize(
    ("asked", "algorithm", "verdicts", "chosen"),
    [
        ("staged", "ring", WORKS, "staged (as asked)"),
        ("auto", "ring", [], "staged (MPI was not tried on device memory)"),
        ("auto", "ring", WORKS, "direct (MPI did ring on device memory in a trial)"),
        ("auto", "native", WORKS, "direct (MPI did all-gather and native on device memory"),
        ("direct", "ring", ONLY_RING, "direct (MPI did ring on device memory in a trial)"),
        ("auto", "ring", NO_RING, "staged (in a trial MPI did not do ring on device memory)"),
        ("auto", "auto", NO_RING, "staged (in a trial MPI did not do ring on device memory)"),
    ],
)
def test_the_way_and_its_reason(
    asked: CudaBuffers,
    algorithm: ReduceScatter | Literal["auto"],
    verdicts: list[ProbeVerdict],
    chosen: str,
) -> None:
    assert str(choose_route(asked, algorithm, verdicts)).startswith(chosen)


@pytest.mark.parametrize(
    ("hosts", "asked", "chosen"),
    [
        (["n0", "n0"], "auto", "direct (MPI did ring on device memory in a trial)"),
        (["n0", "n1"], "auto", "staged (MPI was tried on device memory within one of 2 hosts)"),
        (["n0", "n1"], "direct", "direct (MPI did ring on device memory in a trial)"),
    ],
)
def test_an_mpi_that_works_within_a_host_is_relied_on_between_hosts_only_if_asked_to(
    hosts: list[str], asked: CudaBuffers, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_on(monkeypatch, LazyDevice())
    monkeypatch.setattr("dearmpi.device.route_choice.known_verdicts", lambda: tuple(WORKS))

    def rank(world: World) -> str:
        _, optimizer = distribute(world, cuda_buffers=asked)
        name = optimizer._built.updates.comm_stream.name
        optimizer.close()
        return name

    assert run_ranks(SIZE, rank, hub=FakeHub(SIZE, hosts=hosts)) == [chosen] * SIZE


@pytest.mark.parametrize(
    ("verdicts", "said"), [([], "probe_devices"), (NO_RING, "Segmentation fault")]
)
def test_direct_is_refused_without_proof(verdicts: list[ProbeVerdict], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        choose_route("direct", "ring", verdicts)


def test_memory_that_is_out_is_told_with_its_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", refuse)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (512 << 20, 8192 << 20))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 7000 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    with raises(DeviceError, "device-memory-full", "1024.0", "512", "8192", "7000"):
        zeros(1 << 28, torch.ones(1))


def test_a_stream_that_is_captured_neither_asks_nor_waits() -> None:
    """CUDA forbids the one, and the other for events from outside: synchronize() comes before."""

    class Refusing:
        def query(self) -> bool:
            raise AssertionError("operation not permitted when stream is capturing")

    device = LazyDevice()
    comm_stream = DeviceCommStream(device, None)
    device.captures = True
    assert not comm_stream.await_mark(Refusing())
    device.captures = False
    with pytest.raises(AssertionError, match="capturing"):
        comm_stream.await_mark(Refusing())
