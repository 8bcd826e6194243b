"""History: what is typical of a run, of which rows may tell of several numbers of ranks."""

from __future__ import annotations

from dearmpi.report.read.run_files import History, HistoryRow


def paced(*points: tuple[int, float]) -> History:
    """From (step, elapsed_s) of each row; a step takes a second."""
    return History(tuple(HistoryRow(step, elapsed_s, step_s=1.0) for step, elapsed_s in points))


def rows(first_step: int, num_ranks: int, *steps_s: float) -> list[HistoryRow]:
    """One row per step; the waits and exchanges of ranks in proportion."""
    return [
        HistoryRow(
            step,
            step_s=step_s,
            communication_s=0.5 * step_s,
            rank_step_s=(step_s,) * num_ranks,
            rank_wait_s=(0.25 * step_s,) * num_ranks,
            rank_data_s=(0.0,) * num_ranks,
        )
        for step, step_s in enumerate(steps_s, first_step)
    ]


def test_what_is_typical_is_of_the_ranks_that_trained_last() -> None:
    history = History((*rows(1, 4, 9.0, 8.0, 8.0, 8.0, 8.0), *rows(6, 2, 3.0, 2.0, 1.0, 2.0)))
    assert history.typical(lambda row: row.step_s) == 2.0
    assert history.typical(lambda row: row.communication_s) == 1.0
    assert history.typical_ranks() == ((2.0, 0.5, 0.0),) * 2


def test_what_the_last_ranks_did_not_measure_is_not_taken_from_others() -> None:
    history = History((*rows(1, 4, 9.0, 8.0), HistoryRow(3, step_s=1.0, rank_step_s=(1.0,))))
    assert history.typical(lambda row: row.step_s) == 1.0
    assert history.typical(lambda row: row.communication_s) is None


def test_rows_that_tell_of_no_ranks_count() -> None:
    history = History(tuple(HistoryRow(step, step_s=float(step)) for step in range(1, 5)))
    assert history.typical(lambda row: row.step_s) == 3.0


def test_what_is_done_between_steps_is_that_of_a_run_under_way() -> None:
    """Neither what comes before the first row counts, nor what is due at the end."""
    begin, end = (10, 25.0), (40, 90.0)
    assert paced(begin, (20, 35.0), (30, 45.0), end).between_s() == 0.0
    assert paced(begin, (20, 35.0), (30, 53.0), end).between_s() == 0.4
    assert paced((10, 9.0), (20, 30.0)).between_s() == 0.0


def test_the_clock_of_a_run_that_went_on_begins_anew() -> None:
    assert paced((10, 25.0), (20, 37.0), (30, 15.0), (40, 27.0), (50, 40.0)).between_s() == 0.2
