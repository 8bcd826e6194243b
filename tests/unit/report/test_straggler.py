"""Which rank holds the others up."""

from __future__ import annotations

import pytest

from dearmpi.report.straggler import WORTH, Straggler, find_straggler


def find(*ranks: tuple[float, float]) -> Straggler | None:
    """From (busy_s, wait_s) of each rank."""
    step_s = max((sum(rank) for rank in ranks), default=0.0)
    return find_straggler([busy for busy, _ in ranks], [wait for _, wait in ranks], step_s=step_s)


def test_the_rank_for_which_the_others_wait_is_found() -> None:
    found = find((0.1, 0.15), (0.11, 0.14), (0.25, 0.0), (0.1, 0.15))
    assert found is not None and found.place == 2
    assert (found.busy_s, found.typical_s) == pytest.approx((0.25, 0.1))
    assert (found.waited_s, found.excess_s) == pytest.approx((0.15, 0.15))


@pytest.mark.parametrize(
    "ranks",
    [
        [(0.5, 0.0)],
        [(0.1, 0.01), (0.11, 0.0)],  # no two machines are alike
        [(0.1, 0.0), (0.3, 0.0)],  # nobody waits for it
        [(0.1, 0.4), (0.2, 0.4)],  # it waits for the network as long as the others
        [(0.0, 0.0), (0.0, 0.0)],
        [],
    ],
)
def test_differences_that_harm_nobody_are_not_told(ranks: list[tuple[float, float]]) -> None:
    assert find(*ranks) is None


@pytest.mark.parametrize(("more", "is_slow"), [(-0.01, False), (0.01, True)])
def test_it_must_cost_a_share_of_a_step(more: float, is_slow: bool) -> None:
    excess_s = WORTH + more
    assert (find((1.0 - excess_s, excess_s), (1.0, 0.0)) is not None) is is_slow
