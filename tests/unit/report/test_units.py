"""Numbers as people read them."""

from __future__ import annotations

import pytest

from dearmpi.report.draw.units import value_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0000"),
        (2.30259, "2.3026"),
        (-0.00123, "-0.0012"),
        (0.000567, "0.000567"),
        (-3.21e-7, "-3.21e-07"),
        (float("nan"), "nan"),
    ],
)
def test_a_small_loss_is_not_shown_as_none(value: float, text: str) -> None:
    assert value_text(value) == text
