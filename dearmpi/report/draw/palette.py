"""Colours by name, for light and dark backgrounds.

The series are those of Okabe and Ito ("Color Universal Design", 2008), which people with any kind
of colour vision tell apart. Vermillion is kept for lost time.
"""

from __future__ import annotations

from collections.abc import Mapping

_SERIES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#f0e442")
_ON_SERIES = ("#ffffff", "#000000", "#000000", "#000000", "#000000", "#000000")

_BOTH: dict[str, str] = {
    "lost": "#d55e00",
    **{f"bucket{i}": colour for i, colour in enumerate(_SERIES)},
    **{f"on-bucket{i}": colour for i, colour in enumerate(_ON_SERIES)},
}
LIGHT: Mapping[str, str] = _BOTH | {
    "paper": "#ffffff",
    "ink": "#1f2428",
    "faint": "#5b646b",
    "grid": "#d5dadd",
    "feed-forward": "#b4c0c9",
    "backprop": "#7f909c",
    "data": "#4b3f72",
    "plain": "#b4c0c9",
    "first": "#0072b2",
    "second": "#b35000",
    "third": "#56b4e9",
    "fourth": "#e69f00",
    "fifth": "#4b3f72",
    "sixth": "#7f909c",
    "lost-text": "#a84800",
}
DARK: Mapping[str, str] = _BOTH | {
    "paper": "#14181b",
    "ink": "#e8ecee",
    "faint": "#a3adb4",
    "grid": "#363e44",
    "feed-forward": "#5b6972",
    "backprop": "#84939d",
    "data": "#a99bd6",
    "plain": "#5b6972",
    "first": "#56b4e9",
    "second": "#e69f00",
    "third": "#0072b2",
    "fourth": "#b35000",
    "fifth": "#f0e442",
    "sixth": "#5b6972",
    "lost-text": "#ff9147",
}


def bucket_colour(bucket: int) -> str:
    """The colour of a bucket; neighbours differ."""
    return f"bucket{bucket % len(_SERIES)}"


def on_bucket_colour(bucket: int) -> str:
    """The colour of text upon it."""
    return f"on-{bucket_colour(bucket)}"
