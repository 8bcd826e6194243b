"""Ranks that differ learn in what, where, and what to do."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import torch

import dearmpi
from dearmpi.errors import MismatchError
from dearmpi.train.fingerprint import (
    argument_fingerprints,
    code_fingerprint,
    compare,
    model_fingerprints,
)


class Ranks:
    """Gathers texts between threads, one for each rank."""

    def __init__(self, size: int) -> None:
        self.texts = [""] * size
        self.barrier = threading.Barrier(size, timeout=30)


class Rank:
    def __init__(self, ranks: Ranks, rank: int, host: str) -> None:
        self.ranks, self.rank, self.host = ranks, rank, host

    def all_gather_text(self, text: str) -> list[str]:
        self.ranks.texts[self.rank] = text
        self.ranks.barrier.wait()
        return list(self.ranks.texts)


def compare_all(*items: Mapping[str, str]) -> list[str | None]:
    """Compare on as many ranks as there are items, two to a host; each rank's message or None."""
    ranks = Ranks(len(items))
    messages: list[str | None] = [None] * len(items)

    def run(rank: int) -> None:
        try:
            compare(Rank(ranks, rank, f"node{rank // 2}"), items[rank])
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
