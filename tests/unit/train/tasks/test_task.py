"""Task options: strings into a dataclass, with messages that help."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from dearmpi.errors import TaskError
from dearmpi.train.tasks.task import read_options
from tests.codes import raises


@dataclass(frozen=True, slots=True)
class Sizes:
    path: str
    width: int = 4
    rate: float = 0.5
    tied: bool = False
    limit: int | None = None


def test_options_are_read_by_the_type_of_their_field() -> None:
    given = {"path": "a b", "width": "7", "rate": "1e-3", "tied": "Yes", "limit": "9"}
    sizes = read_options(Sizes, given, task="sizes")
    assert sizes == Sizes(path="a b", width=7, rate=1e-3, tied=True, limit=9)


def test_options_not_given_keep_their_defaults() -> None:
    assert read_options(Sizes, {"path": "x"}, task="sizes") == Sizes(path="x")


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"widht": "7"}, ("unknown-task-option", "'widht'", "'width'")),
        ({"path": "x", "width": "7.5"}, ("wrong-type", "width is", "'7.5'")),
        ({"path": "x", "rate": "fast"}, ("wrong-type", "rate is", "'fast'")),
        ({"path": "x", "tied": "maybe"}, ("wrong-type", "tied is", "'maybe'")),
        ({"path": "x", "limit": "none"}, ("wrong-type", "limit is", "'none'")),
        ({"width": "3"}, ("task-option-missing", "'path'", "--task-option")),
    ],
)
def test_bad_options_are_explained(given: dict[str, str], refused: tuple[str, ...]) -> None:
    with raises(TaskError, *refused):
        read_options(Sizes, given, task="sizes")
