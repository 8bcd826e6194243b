"""Rows of many ranks are short, and the report still finds the slow ones by them."""

from __future__ import annotations

import json
import random
from collections.abc import Collection
from pathlib import Path

import pytest

from dearmpi.report.analyse.figures import measure
from dearmpi.report.page.limit import judge
from dearmpi.report.read.recording import Recording
from dearmpi.report.read.run_files import History, read_history
from dearmpi.train.metrics import step_times
from dearmpi.train.metrics.metrics import MetricsLog, MetricsRow
from dearmpi.train.metrics.step_times import RankTimes

NUM_RANKS = 512
HOSTS = tuple(f"n{rank // 128}" for rank in range(NUM_RANKS))
NUM_ROWS = 12


def train(folder: Path, slow: Collection[int], num_ranks: int = NUM_RANKS) -> History:
    """What is read of a run in which the ranks in ``slow`` are busy half as long again."""
    noise = random.Random(7)
    with MetricsLog(folder) as log:
        for row in range(1, NUM_ROWS + 1):
            busy_s = [
                (0.6 if rank in slow else 0.4) + noise.gauss(0, 0.01) for rank in range(num_ranks)
            ]
            step_s = max(busy_s) + 0.01
            ranks = tuple(RankTimes(step_s, step_s - own_s, 0.01) for own_s in busy_s)
            log.append(MetricsRow(10 * row, 0, elapsed_s=10 * row * step_s, ranks=ranks))
    return read_history(folder / "metrics.jsonl")


def limit_of(history: History) -> str:
    figures = measure(history, Recording(), hosts=HOSTS, schedule="dear")
    assert figures is not None
    return judge(figures).sentence


@pytest.mark.parametrize(
    ("slow", "told"),
    [
        (range(128, 256), "Ranks 128 to 255 on n1 limit this run"),
        ([300], "Rank 300 on n2 limits this run"),
        ([], "Computation limits this run"),
    ],
)
def test_the_report_names_slow_ranks_of_many_as_if_all_were_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: Collection[int], told: str
) -> None:
    assert limit_of(train(tmp_path, slow)).startswith(told)
    short = (tmp_path / "metrics.jsonl").stat().st_size
    monkeypatch.setattr(step_times, "MOST_LISTED", NUM_RANKS)
    (tmp_path / "all").mkdir()
    assert limit_of(train(tmp_path / "all", slow)).startswith(told)
    assert short < (tmp_path / "all" / "metrics.jsonl").stat().st_size / 2


def test_a_row_grows_with_the_ranks_up_to_a_limit(tmp_path: Path) -> None:
    sizes = []
    for num_ranks in (64, 65, 4096):
        folder = tmp_path / str(num_ranks)
        folder.mkdir()
        history = train(folder, [3], num_ranks)
        assert len(history.typical_ranks()) == num_ranks
        assert history.slow_ranks().share(3) == 1.0
        sizes.append((folder / "metrics.jsonl").stat().st_size / NUM_ROWS)
    assert sizes[1] < sizes[0] < 2500 and sizes[2] < 1000


def test_what_a_row_tells_of_many_ranks_can_be_read_by_people(tmp_path: Path) -> None:
    train(tmp_path, [3], 100)
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    told = row["rank_times"]
    assert told["num_ranks"] == 100 and "3" in told["busiest"] and len(told["busiest"]) == 8
    wait_s = told["wait_s"]
    assert wait_s["min"] == told["busiest"]["3"][1] < wait_s["median"] < wait_s["max"]


@pytest.mark.parametrize(
    "broken",
    [
        7,
        {},
        {"num_ranks": "many"},
        {"num_ranks": 1e9},
        {"num_ranks": -1},
        {"num_ranks": 10**12},
        {"busiest": {"x": [1, 1, 1]}},
        {"busiest": {"1": [1, 1]}},
        {"busiest": [1]},
        {"step_s": {"median": "long"}},
        {"wait_s": 3},
    ],
)
def test_a_row_that_tells_of_ranks_in_another_way_counts_without_them(
    tmp_path: Path, broken: object
) -> None:
    train(tmp_path, [3], 100)
    path = tmp_path / "metrics.jsonl"
    row = json.loads(path.read_text().splitlines()[-1])
    told = {**row["rank_times"], **broken} if isinstance(broken, dict) and broken else broken
    path.write_text(json.dumps({**row, "rank_times": told}) + "\n")
    history = read_history(path)
    assert history.typical_ranks() == () and len(history.rows) == 1
