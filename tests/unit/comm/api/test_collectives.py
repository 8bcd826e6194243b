"""Chains: operations one after the other, which hold up nobody beside them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dearmpi.comm.api.collectives import Chain, Completed, Movement, Request
from dearmpi.errors import CommError
from tests.codes import raises


class Held(Request):
    """Complete once somebody lets it be."""

    def __init__(self) -> None:
        self.is_over = False

    def test(self) -> bool:
        return self.is_over

    @property
    def movement(self) -> Movement:
        return Movement.MESSAGE


def test_a_step_begins_when_the_one_before_is_complete_and_one_in_each_test() -> None:
    first, begun = Held(), []

    def steps() -> Iterator[Request]:
        begun.append("first")
        yield first
        begun.append("second")
        yield Completed()
        begun.append("third")
        yield Completed()
        begun.append("end")

    chain = Chain(steps())
    assert begun == ["first"]
    seen = [(chain.test(), len(begun), chain.movement)]
    first.is_over = True
    seen += [(chain.test(), len(begun), chain.movement) for _ in range(4)]
    assert seen == [
        (False, 1, Movement.MESSAGE),
        (False, 2, Movement.OPERATION),
        (False, 3, Movement.OPERATION),
        (True, 4, Movement.OPERATION),
        (True, 4, Movement.OPERATION),
    ]


def test_a_chain_that_was_interrupted_does_not_seem_complete() -> None:
    """Whoever polls may catch what a Ctrl-C raises, and poll again."""

    def steps() -> Iterator[Request]:
        yield Completed()
        raise KeyboardInterrupt
        yield Completed()

    chain = Chain(steps())
    with pytest.raises(KeyboardInterrupt):
        chain.test()
    with raises(CommError, "communication-interrupted"):
        chain.test()


def test_a_chain_without_steps_is_complete() -> None:
    assert Chain(iter(())).test()
