"""A stream on one process: what is read of it, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from dearmpi.comm.world import World
from dearmpi.errors import DataError
from dearmpi.train.settings.settings import RunSettings
from tests.codes import raises
from tests.unit.train.points import SGD, Points, make_job, make_task, train


def test_data_that_can_be_read_once_end_the_run_where_they_end(
    alone: World, tmp_path: Path
) -> None:
    points = Points(20)
    task = replace(make_task(), train_data=(points[index] for index in range(16)))
    job = make_job(alone, RunSettings(max_steps=3, **SGD), task)
    with raises(DataError, "data-insufficient", "step 3 of 3"):
        train(job, tmp_path)


class Broken:
    def __iter__(self) -> Iterator[Any]:
        yield from (Points(20)[index] for index in range(10))
        raise OSError("the disk is gone")


def test_what_cannot_be_read_is_told_with_its_step(alone: World, tmp_path: Path) -> None:
    task = replace(make_task(), train_data=Broken())
    job = make_job(alone, RunSettings(max_steps=3, **SGD), task)
    with raises(DataError, "sample-unreadable", "step 1 of epoch 0", "the disk is gone"):
        train(job, tmp_path)
