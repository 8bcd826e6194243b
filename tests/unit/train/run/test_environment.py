"""Ranks that differ learn in what, where, and what to do."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

import dearmpi
from dearmpi.errors import MismatchError
from dearmpi.train.run.environment import (
    argument_fingerprints,
    code_fingerprint,
    compare,
    model_fingerprints,
    model_lines,
)


class Ranks:
    """Gathers texts between threads, one for each rank."""

    def __init__(self, size: int) -> None:
        self.texts = [""] * size
        self.barrier = threading.Barrier(size, timeout=60)


class Rank:
    def __init__(self, ranks: Ranks, rank: int, host: str) -> None:
        self.ranks, self.rank, self.host = ranks, rank, host

    def all_gather_text(self, text: str) -> list[str]:
        self.ranks.texts[self.rank] = text
        self.ranks.barrier.wait()
        told = list(self.ranks.texts)
        self.ranks.barrier.wait()  # before anybody tells the next
        return told


def compare_all(*items: Mapping[str, str], models: Sequence[nn.Module] = ()) -> list[str | None]:
    """Compare on as many ranks as there are items, two to a host; each rank's message or None.

    models: each rank's, if any.
    """
    ranks = Ranks(len(items))
    messages: list[str | None] = [None] * len(items)

    def run(rank: int) -> None:
        try:
            lines = model_lines(models[rank].state_dict()) if models else {}
            compare(Rank(ranks, rank, f"node{rank // 2}"), items[rank], lines)
        except MismatchError as error:
            messages[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(items))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return messages


def test_equal_ranks_pass() -> None:
    assert compare_all({"code": "1"}) == [None]
    assert compare_all(*[{"code": "1", "model shapes": "2"}] * 3) == [None] * 3


def test_every_rank_names_the_item_the_ranks_and_both_values() -> None:
    common = {"model shapes": "abc"}
    first, second = common | {"code": "0.1+aaa"}, common | {"code": "0.1+bbb"}
    messages = compare_all(first, first, first, second, first)
    assert messages[0] == (
        "code differs: 0.1+aaa on ranks 0-2, 4 (node0, node1, node2); 0.1+bbb on rank 3 (node1)\n"
        "To cure it, install the same dearmpi on every host."
    )
    assert messages == [messages[0]] * 5


def test_a_differing_argument_is_named_with_its_values() -> None:
    left = argument_fingerprints({"lr": 0.1, "task": "digits", "options": {"width": 3}})
    right = argument_fingerprints({"lr": 0.2, "task": "digits", "options": {"width": 3}})
    message = compare_all(left, right)[1]
    assert message is not None
    assert "argument lr differs: 0.1 on rank 0 (node0); 0.2 on rank 1 (node0)" in message
    assert "same command line" in message
    assert "task" not in message


def test_an_item_that_a_rank_lacks_differs() -> None:
    message = compare_all({"argument lr": "1"}, {})[0]
    assert message is not None and "1 on rank 0 (node0); absent on rank 1 (node0)" in message


def test_many_differences_stay_readable() -> None:
    message = compare_all({f"argument {i}": "a" for i in range(50)}, {})[0]
    assert message is not None and "and 45 more items" in message
    assert message.count("\n") == 6


def test_long_arguments_are_hashed_and_still_told_apart() -> None:
    left, right = "x" * 1000 + "a", "x" * 1000 + "b"
    a, b = argument_fingerprints({"v": left}), argument_fingerprints({"v": right})
    assert a != b
    assert len(a["argument v"]) < 80


def test_the_code_is_told_apart_by_any_source(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/a.py").write_text("x = 1\n")
    one = code_fingerprint(tmp_path)
    assert one.startswith(f"{dearmpi.__version__}+")
    (tmp_path / "notes.txt").write_text("not code")
    assert code_fingerprint(tmp_path) == one
    (tmp_path / "sub/a.py").write_text("x = 2\n")
    two = code_fingerprint(tmp_path)
    (tmp_path / "sub/a.py").rename(tmp_path / "sub/b.py")
    assert len({one, two, code_fingerprint(tmp_path)}) == 3
    assert code_fingerprint() != code_fingerprint(tmp_path)


def test_shapes_and_values_of_a_model_are_told_apart() -> None:
    state = {
        "w": torch.ones(2, 3),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "mask": torch.tensor(True),
        "none": torch.empty(0),
    }
    base = model_fingerprints(state)
    other = model_fingerprints(state | {"w": torch.full((2, 3), 1.0000001)})
    assert other["model shapes"] == base["model shapes"]
    assert other["model values"] != base["model values"]
    for change in ({"w": torch.ones(3, 2)}, {"w": torch.ones(2, 3).double()}, {"v": torch.ones(1)}):
        assert model_fingerprints(state | change)["model shapes"] != base["model shapes"]
    copied = {name: tensor.clone() for name, tensor in state.items()}
    assert model_fingerprints(copied) == base


def compare_models(*models: nn.Module) -> str:
    """What all ranks are told that have these models."""
    items = [model_fingerprints(model.state_dict()) for model in models]
    (message, *others) = compare_all(*items, models=models)
    assert message is not None and others == [message] * len(others)
    return message


def test_of_models_that_differ_the_first_parameter_to_do_so_is_named() -> None:
    torch.manual_seed(1)
    usual, wide = (nn.Sequential(nn.Linear(2, 3), nn.Linear(3, width)) for width in (4, 5))
    message = compare_models(usual, usual, wide)
    assert message.startswith(
        "model shapes differs: 1.weight (4, 3) float32 on ranks 0-1 (node0); "
        "1.weight (5, 3) float32 on rank 2 (node1)\n"
    )
    without = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4, bias=False))
    assert (
        "model shapes differs: 1.bias (4,) float32 on rank 0 (node0); nothing further on rank 1"
        in compare_models(usual, without)
    )


def test_of_values_that_differ_the_first_parameter_is_named() -> None:
    one, other = (nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4)) for _ in range(2))
    other.load_state_dict(one.state_dict())
    state = other.state_dict()
    state["1.weight"][2, 1] += 1.0
    state["1.bias"][0] += 1.0
    message = compare_models(one, one, other)
    assert "model values differs: 1.weight (hash " in message and "shapes" not in message
    assert message.count("1.weight (hash ") == 2 and "bias" not in message
