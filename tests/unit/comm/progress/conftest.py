"""What tests of progress share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dearmpi.comm.progress import progress as module
from dearmpi.comm.progress.progress import Progress
from tests.unit.comm.progress.works import LIMIT_S, MODES, limited


@pytest.fixture(autouse=True)
def _no_periodic_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiters look up now and then of their own; without that, a lost notification is a hang."""
    monkeypatch.setattr(module, "_WAKE_S", LIMIT_S * 10)


@pytest.fixture(params=MODES)
def progress(request: pytest.FixtureRequest) -> Iterator[Progress]:
    with limited(Progress(request.param, origin="rank 3 on n7")) as progress:
        yield progress


@pytest.fixture
def threaded() -> Iterator[Progress]:
    with limited(Progress("thread", origin="rank 3 on n7")) as progress:
        yield progress
