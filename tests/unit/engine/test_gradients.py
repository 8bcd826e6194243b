"""Gradients however a script makes them: what plain torch makes of it in one process is right."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.mpi.oracle import Case, Training
from tests.unit.engine.same_as_alone import EVERY_WAY, assert_same_as_alone


@EVERY_WAY
@pytest.mark.parametrize("size", [2, 3])
def test_gradients_of_two_backprops_add_up(case: Case, size: int) -> None:
    def script(training: Training) -> None:
        for step in range(4):
            training.optimizer.zero_grad()
            training.backward(step)
            training.backward(step + 1)
            training.optimizer.step()

    assert_same_as_alone(script, case, size)


@EVERY_WAY
def test_a_backprop_after_clipping_adds_to_what_is_clipped(case: Case) -> None:
    def script(training: Training) -> None:
        for step in range(3):
            training.optimizer.zero_grad()
            training.backward(step)
            training.clip(2.0)
            training.backward(step + 1)
            training.clip(float("inf"))
            training.backward(step + 2)
            training.optimizer.step()

    assert_same_as_alone(script, case)


@EVERY_WAY
def test_backprops_that_use_different_branches_add_up(case: Case) -> None:
    """Some samples, on some ranks, take the branch in the first backprop, others in the second."""

    def script(training: Training) -> None:
        for first, second in ((0, 2), (1, 0), (3, 5), (1, 4), (2, 1)):
            training.optimizer.zero_grad()
            training.backward(first)
            training.backward(second)
            training.optimizer.step()

    assert_same_as_alone(script, replace(case, model="branches"), size=3)


@EVERY_WAY
def test_gradients_dropped_by_zero_grad_leave_no_trace(case: Case) -> None:
    def script(training: Training) -> None:
        for step in range(3):
            training.optimizer.zero_grad()
            training.backward(step + 7)
            training.optimizer.zero_grad()
            training.optimizer.zero_grad()
            training.backward(step)
            training.optimizer.step()
        training.backward(9)
        training.optimizer.zero_grad()

    assert_same_as_alone(script, replace(case, model="branches"))


@EVERY_WAY
def test_a_step_without_backprop_changes_nothing(case: Case) -> None:
    def script(training: Training) -> None:
        training.optimizer.step()
        training.step(0)
        training.optimizer.zero_grad()
        training.optimizer.step()
        training.optimizer.step()
        training.step(1)

    assert_same_as_alone(script, case)


@EVERY_WAY
def test_a_step_after_no_sync_alone_uses_what_all_ranks_have_gathered(case: Case) -> None:
    def script(training: Training) -> None:
        for step in range(3):
            training.optimizer.zero_grad()
            with training.no_sync():
                training.backward(step)
                training.backward(step + 1)
            training.optimizer.step()

    assert_same_as_alone(script, replace(case, model="branches"))


@EVERY_WAY
def test_local_gradients_are_dropped_by_zero_grad(case: Case) -> None:
    def script(training: Training) -> None:
        for step in range(3):
            with training.no_sync():
                training.backward(step + 7)
            training.optimizer.zero_grad()
            with training.no_sync():
                training.backward(step + 1)
            training.backward(step)
            training.optimizer.step()
            training.optimizer.zero_grad()

    assert_same_as_alone(script, case)


@EVERY_WAY
def test_zero_grad_to_zeros(case: Case) -> None:
    def script(training: Training) -> None:
        for step in range(3):
            training.optimizer.zero_grad(set_to_none=False)
            with training.no_sync():
                training.backward(step + 1)
            training.backward(step)
            training.optimizer.step()

    assert_same_as_alone(script, case)


@EVERY_WAY
def test_a_closure_is_evaluated_with_gradients_before_the_step(case: Case) -> None:
    losses: dict[int | None, list[float]] = defaultdict(list)  # by rank

    def script(training: Training) -> None:
        for step in range(3):

            def closure(step: int = step) -> Any:
                training.optimizer.zero_grad()
                loss = training.loss(step)
                loss.backward()
                return loss

            with torch.no_grad():
                rank = training.world.rank if training.world else None
                losses[rank].append(float(training.optimizer.step(closure)))

    assert_same_as_alone(script, case)
    means = [sum(pair) / 2 for pair in zip(losses[0], losses[1], strict=True)]
    assert len(means) == 3 and losses[None] == pytest.approx(means, rel=1e-9)


@EVERY_WAY
def test_gradients_set_by_hand_are_averaged(case: Case) -> None:
    def script(training: Training) -> None:
        for step in range(3):
            training.optimizer.zero_grad()
            rank = training.world.rank if training.world else 0.5
            for number, param in enumerate(training.model.parameters()):
                param.grad = torch.full_like(param, number + step + rank)
            training.optimizer.step()

    assert_same_as_alone(script, case)


@EVERY_WAY
def test_backprop_adds_to_gradients_set_by_hand(case: Case) -> None:
    def script(training: Training) -> None:
        for step in range(3):
            training.optimizer.zero_grad()
            for number, param in enumerate(training.model.parameters()):
                param.grad = torch.full_like(param, number + step)
            training.backward(step)
            training.backward(step + 1)
            training.optimizer.step()

    assert_same_as_alone(script, case)


@EVERY_WAY
def test_options_are_read_at_the_step(case: Case) -> None:
    def script(training: Training) -> None:
        for step in range(4):
            training.optimizer.zero_grad()
            training.backward(step)
            for group in training.optimizer.param_groups:
                group["lr"] = 0.01 * (step + 1)
            training.optimizer.step()
            for group in training.optimizer.param_groups:
                group["lr"] = 1000.0  # too late for this step

    assert_same_as_alone(script, case)


@EVERY_WAY
def test_feed_forward_without_backprop_disturbs_nothing(case: Case) -> None:
    def script(training: Training) -> None:
        for step in range(3):
            training.step(step)
            training.loss(step)
            with torch.no_grad():
                training.loss(step + 1)
            training.model.eval()
            training.loss(step)
            training.model.train()

    assert_same_as_alone(script, case)


@EVERY_WAY
def test_two_feed_forwards_of_one_backprop(case: Case) -> None:
    def script(training: Training) -> None:
        for step in range(3):
            training.optimizer.zero_grad()
            (training.loss(step) + training.loss(step + 1)).backward()
            training.optimizer.step()

    assert_same_as_alone(script, case)


@EVERY_WAY
def test_model_zero_grad_drops_what_is_being_reduced(case: Case) -> None:
    """As where two models train by turns: one's backprop leaves gradients in the other."""

    def script(training: Training) -> None:
        for step in range(4):
            training.backward(step + 7)
            training.model.zero_grad()
            training.backward(step)
            training.backward(step + 1)
            training.optimizer.step()
            training.model.zero_grad()

    assert_same_as_alone(script, case)


@EVERY_WAY
def test_zero_grad_to_zeros_where_buckets_change_meanwhile(case: Case) -> None:
    """Parameters that have had a gradient decay in steps in which they have none."""

    def script(training: Training) -> None:
        for step in range(5):
            training.optimizer.zero_grad(set_to_none=False)
            training.backward(step if step < 2 else 1)
            training.optimizer.step()
            if step == 1 and training.world is not None:
                training.optimizer.fuse(0.0001)

    assert_same_as_alone(script, replace(case, model="branches"))


@EVERY_WAY
def test_model_zero_grad_where_the_next_backprop_uses_more_of_the_model(case: Case) -> None:
    """Whichever gradient comes first: one that was cleared, or one that there was not."""

    def script(training: Training) -> None:
        for first, second in ((1, 0), (3, 5), (0, 2), (4, 1)):
            training.backward(first)
            training.model.zero_grad()
            training.backward(second)
            training.backward(first)
            training.optimizer.step()
            training.model.zero_grad()

    assert_same_as_alone(script, replace(case, model="branches", cap_mb=0.0001))


@EVERY_WAY
def test_gradients_that_no_sync_keeps_outlive_their_buckets(case: Case) -> None:
    def script(training: Training) -> None:
        for step in range(4):
            training.optimizer.zero_grad()
            with training.no_sync():
                training.backward(step)
            if step and training.world is not None:
                training.optimizer.fuse(1.0 if step == 2 else 0.0001)
            training.backward(step + 1)
            training.optimizer.step()

    assert_same_as_alone(script, case)


def test_64_ranks_train_a_step_as_one_process_does() -> None:
    """Most of them without a sample, and with shards of few elements or none."""

    def script(training: Training) -> None:
        training.step(0)

    assert_same_as_alone(script, Case(optimizer="adamw", groups=2), size=64)
