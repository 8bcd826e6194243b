"""Task options: strings into a dataclass, with messages that help."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from dearmpi.errors import TaskError
from dearmpi.train.tasks.options import read_options


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
    ("given", "message"),
    [
        ({"widht": "7"}, "sizes has no option 'widht'; did you mean 'width'.*known: path, width"),
        ({"path": "x", "width": "7.5"}, "option width is '7.5'; it must be a whole number"),
        ({"path": "x", "rate": "fast"}, "option rate is 'fast'; it must be a number"),
        ({"path": "x", "tied": "maybe"}, "option tied is 'maybe'; it must be true or false"),
        ({"path": "x", "limit": "none"}, "option limit is 'none'; it must be a whole number"),
        ({"width": "3"}, "'path'.*--task-option"),
    ],
)
def test_bad_options_are_explained(given: dict[str, str], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        read_options(Sizes, given, task="sizes")
