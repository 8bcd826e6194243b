"""Ranks in one process, for tests: collectives without MPI, with delays, faults and records.

A ``FakeHub`` joins the ranks. It decides how long operations take and what goes wrong, and records
what was posted when. ``ranks.run_ranks`` runs a function on all ranks. An operation happens once
every rank has posted it: the nth on a communicator matches the nth of the other ranks. If kinds or
lengths differ, it is an error on all of them.

Operations on channels (duplicated communicators) share one wire, which carries one at a time; the
exchanges of ``World`` itself, on communicator 0, take no time and meet no fault. Buffers live on
the host. As with MPI, a buffer in flight, and after a reduce-scatter all but the own shard of it,
holds nothing of use: here, bytes of 0xFF, which are NaN in every float type.
"""

from __future__ import annotations

from tests.fakes.clock import FakeClock
from tests.fakes.collectives import FakeCollectives
from tests.fakes.fault import Action, Fault
from tests.fakes.hub import FakeHub
from tests.fakes.record import Carried, Record

__all__ = ["Action", "FakeClock", "FakeCollectives", "FakeHub", "Fault", "Record", "Carried"]
