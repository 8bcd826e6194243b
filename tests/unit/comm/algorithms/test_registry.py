"""The registry: every name has an algorithm and a cost, and a new algorithm needs no other line."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from dearmpi.comm.algorithms import registry
from dearmpi.comm.algorithms.algorithm import SendScheduler
from dearmpi.comm.algorithms.registry import (
    ALGORITHMS,
    AlgorithmCollectives,
    CollectiveAlgorithms,
)
from dearmpi.comm.api.collectives import Buffer, Completed, Request
from dearmpi.config import ADDED_BY_LIBRARY, ReduceScatter
from dearmpi.cuts import Cuts
from dearmpi.plan.model.cost import ALGORITHM_COSTS


def test_every_name_has_an_algorithm_and_a_cost() -> None:
    assert set(ALGORITHMS) == set(ALGORITHM_COSTS) == set(get_args(ReduceScatter))
    assert {algorithm.all_gather for algorithm in ALGORITHMS.values()} <= set(ALGORITHMS)


@pytest.mark.parametrize("name", get_args(ReduceScatter))
def test_half_precision_is_added_by_all_but_the_library(name: ReduceScatter) -> None:
    assert CollectiveAlgorithms(name).can_reduce
    assert CollectiveAlgorithms(name, "bf16").can_reduce == (name not in ADDED_BY_LIBRARY)


class Nothing(AlgorithmCollectives):
    """A library that offers nothing."""

    def start_send(self, *_: Any) -> Request:
        raise NotImplementedError

    start_receive = check_addable = start_library_reduce_scatter = start_send  # type: ignore[assignment]
    start_library_all_gather = start_send  # type: ignore[assignment]


class Filling:
    """An algorithm that fills the own shard with the number of ranks."""

    all_gather = "filling"

    def __init__(self, transport: Any) -> None:
        self._rank = transport.rank

    def start_reduce_scatter(self, buffer: Any, cuts: Cuts, *, carrier: Buffer) -> Request:
        buffer[cuts.slice_of(self._rank)].fill_(cuts.num_ranks)
        return Completed()

    def start_all_gather(self, buffer: Any, cuts: Cuts) -> Request:
        return Completed()


def test_a_new_algorithm_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.ALGORITHMS, "filling", Filling)  # type: ignore[misc]
    collectives = Nothing(rank=1, hosts=("a", "b"), scheduler=SendScheduler())
    name: Any = "filling"
    algorithms = CollectiveAlgorithms(name, "fp16")
    buffer = torch.zeros(4)
    assert algorithms.start_reduce_scatter(buffer, collectives).test()  # type: ignore[arg-type]
    assert buffer.tolist() == [0, 0, 2, 2] and algorithms.can_reduce
    assert algorithms.start_all_gather(buffer, collectives).test()  # type: ignore[arg-type]
