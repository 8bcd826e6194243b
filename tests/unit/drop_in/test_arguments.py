"""The wrapper takes what torch's takes, and type checkers know which arguments there are."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from torch import nn

import dearmpi
from dearmpi.drop_in.arguments import ARGUMENTS, OtherArguments
from dearmpi.errors import ArgumentError
from tests.codes import raises

TORCHS = set(inspect.signature(nn.parallel.DistributedDataParallel).parameters)


def test_there_is_every_argument_of_torchs_wrapper() -> None:
    """Of the version that is installed; newer ones have more."""
    named = set(inspect.signature(dearmpi.DistributedDataParallel).parameters) - {"others"}
    own = named | OtherArguments.__annotations__.keys()
    assert own >= TORCHS
    if "batched_grad_copy" in TORCHS:  # torch 2.13 and newer
        assert own - TORCHS <= {"lazy_bucket_allocation"}  # of 2.15
    assert OtherArguments.__annotations__.keys() <= ARGUMENTS


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({}, True),
        ({"broadcast_buffers": False}, False),
        ({"broadcast_buffers": None}, True),
        ({"forward_sync_buffers": False}, False),
        ({"forward_sync_buffers": True, "broadcast_buffers": False}, True),
        ({"forward_sync_buffers": None, "broadcast_buffers": False}, False),
    ],
)
def test_buffers_are_broadcast_as_torch_says(arguments: Any, shown: bool) -> None:
    model = dearmpi.DistributedDataParallel(nn.Linear(2, 2), **arguments)
    assert model.broadcast_buffers is model.forward_sync_buffers is shown


def test_arguments_without_meaning_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 2)
    dearmpi.DistributedDataParallel(model, bucket_cap_mb_list=None, batched_grad_copy=False)
    assert not capsys.readouterr().err
    dearmpi.DistributedDataParallel(model, bucket_cap_mb_list=[1, 25], batched_grad_copy=True)
    assert "needs no bucket_cap_mb_list, batched_grad_copy; accepted" in capsys.readouterr().err


def test_an_unknown_argument_is_an_error_at_once_and_for_type_checkers() -> None:
    with raises(ArgumentError, "unknown-argument", "devices"):
        dearmpi.DistributedDataParallel(nn.Linear(2, 2), devices=[0])  # type: ignore[call-arg]
