"""Few combinations of settings for the fast set of tests; all of them are for `--all`."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import pytest


def pairwise(factors: dict[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """Few combinations in which every two values of two different factors meet (greedy)."""
    names = list(factors)
    left = {
        (first, a, second, b)
        for place, first in enumerate(names)
        for second in names[place + 1 :]
        for a in range(len(factors[first]))
        for b in range(len(factors[second]))
    }
    while left:
        first, a, second, b = min(left)
        chosen = {first: a, second: b}
        for name in names:
            if name not in chosen:
                gains = [
                    len(_met({**chosen, name: value}, names) & left)
                    for value in range(len(factors[name]))
                ]
                chosen[name] = gains.index(max(gains))
        left -= _met(chosen, names)
        yield {name: factors[name][value] for name, value in chosen.items()}


def pairs_of(**factors: Sequence[Any]) -> pytest.MarkDecorator:
    """All combinations; those beyond a few in which every two values meet are slow."""
    indices = {name: tuple(range(len(values))) for name, values in factors.items()}
    few = {tuple(chosen[name] for name in factors) for chosen in pairwise(indices)}
    return _all_of(factors, few)


def turns_of(**factors: Sequence[Any]) -> pytest.MarkDecorator:
    """All combinations; those beyond a few in which every value occurs are slow."""
    lengths = [len(values) for values in factors.values()]
    few = {tuple(turn % length for length in lengths) for turn in range(max(lengths))}
    return _all_of(factors, few)


def _all_of(
    factors: Mapping[str, Sequence[Any]], few: Container[tuple[int, ...]]
) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        tuple(factors),
        [
            pytest.param(
                *(values[index] for values, index in zip(factors.values(), case, strict=True)),
                marks=() if case in few else pytest.mark.slow,
            )
            for case in product(*(range(len(values)) for values in factors.values()))
        ],
    )


def _met(chosen: dict[str, int], names: list[str]) -> set[tuple[str, int, str, int]]:
    present = [name for name in names if name in chosen]
    return {
        (first, chosen[first], second, chosen[second])
        for place, first in enumerate(present)
        for second in present[place + 1 :]
    }
