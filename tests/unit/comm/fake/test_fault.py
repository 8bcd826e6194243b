"""Delays and faults of in-process ranks, as asked."""

from __future__ import annotations

import pytest
import torch

from dearmpi.errors import CommError
from tests.fakes import FakeClock, FakeHub, Fault
from tests.unit.comm.fake.twins import channels, gather_all


def test_fault_refuse_raises_where_the_operation_is_started() -> None:
    twins = channels(FakeHub(2, faults=[Fault(rank=1, action="refuse", nth=2)]))
    twins[1].start_all_gather(torch.ones(4))
    with pytest.raises(CommError, match="rank 1: AG was refused"):
        twins[1].start_all_gather(torch.ones(4))
    twins[1].start_all_gather(torch.ones(4))


def test_fault_break_raises_where_the_operation_is_tested() -> None:
    faults = [Fault(rank=0, action="break", label="RS")]
    twins = channels(FakeHub(2, faults=faults))
    gathers = [c.start_all_gather(torch.ones(4)) for c in twins]
    scatters = [c.start_reduce_scatter(torch.ones(4), "ring") for c in twins]
    assert all(request.test() for request in gathers)
    with pytest.raises(CommError, match="rank 0: RS broke"):
        scatters[0].test()
    assert scatters[1].test()


def test_fault_stall_keeps_the_operation_from_completing_anywhere() -> None:
    hub = FakeHub(2, faults=[Fault(rank=0, action="stall")])
    _, requests = gather_all(hub)
    assert not any(request.test() for request in requests)
    hub.fail("given up")
    for rank, request in enumerate(requests):
        with pytest.raises(CommError, match=f"rank {rank}: AG cannot complete: given up"):
            request.test()


def test_fault_delay_holds_up_one_rank() -> None:
    clock = FakeClock()
    hub = FakeHub(2, faults=[Fault(rank=1, action="delay", delay_s=2.0)], clock=clock.now)
    _, requests = gather_all(hub)
    assert [request.test() for request in requests] == [True, False]
    clock.advance(2.0)
    assert requests[1].test()
