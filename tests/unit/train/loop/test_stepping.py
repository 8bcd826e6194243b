"""One step: when its losses are read, for which a host waits until its device has computed them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dearmpi.comm.world import World
from dearmpi.train.loop import stepping
from dearmpi.train.loop.stepping import take_step
from dearmpi.train.settings.settings import RunSettings
from tests.unit.train.points import SGD, make_job


@pytest.mark.parametrize(
    ("on_nan", "order"), [("stop", ["step", "read"]), ("skip", ["read", "step", "read"])]
)
def test_losses_are_read_when_the_step_is_queued(
    on_nan: str, order: list[str], alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of several micro-batches; but for ``skip``, which has to know them before."""
    settings = RunSettings(**SGD, max_steps=1, gradient_accumulation_steps=3, on_nan=on_nan)  # type: ignore[arg-type]
    job = make_job(alone, settings)
    seen: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any) -> Any:
            seen.append(name)
            return function(*given)

        return called

    monkeypatch.setattr(job.optimizer, "step", noted("step", job.optimizer.step))
    monkeypatch.setattr(stepping._Losses, "total", noted("read", stepping._Losses.total))
    take_step(job, 0)
    assert seen == order
    job.optimizer.close()


def test_a_task_may_write_its_next_loss_where_the_last_one_is(alone: World) -> None:
    """As what is replayed from a captured graph does."""
    torch.manual_seed(0)
    settings = RunSettings(**SGD, max_steps=1)
    expected = take_step(make_job(alone, settings), 0).loss
    parts = RunSettings(**SGD, max_steps=1, gradient_accumulation_steps=2)
    job = make_job(alone, parts)
    place, loss = torch.zeros(()), job.task.loss

    def in_place(*given: Any) -> Tensor:
        found = loss(*given)
        place.copy_(found.detach())
        shown = found.detach().requires_grad_()  # not what is computed, but where it is read
        shown.data = place
        return shown

    object.__setattr__(job.task, "loss", in_place)
    assert take_step(job, 0).loss == pytest.approx(expected, rel=1e-6)
