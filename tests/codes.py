"""Codes: how tests recognize an error, by its code and its numbers rather than by its wording."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from dearmpi.errors import DearError

E = TypeVar("E", bound=DearError)


@contextmanager
def raises(kind: type[E], code: str, *told: object) -> Iterator[pytest.ExceptionInfo[E]]:
    """Expect an error of ``kind`` with ``code``, whose message has each of ``told`` in it.

    told: what a user needs from the message: numbers, ranks, names of parameters or of settings.
    """
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.value.code == code, f"{caught.value.code!r}: {caught.value}"
    for each in told:
        assert str(each) in str(caught.value)
