"""Collective calls of the world that differ between ranks, and those that do not."""

from __future__ import annotations

import contextlib
import itertools
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from dearmpi.comm.api.call import origin_of, stack_of
from dearmpi.comm.messages.values import HostBuffer
from dearmpi.comm.world import World
from dearmpi.config import EngineConfig, ProgressMode
from dearmpi.errors import ConfigError, MismatchError
from tests.codes import raises
from tests.fakes.ranks import run_ranks

_LONG = "x" * 1000


def _buffer(numel: int, dtype: type = np.float64) -> HostBuffer:
    return HostBuffer(np.ones(numel, dtype))


_CALLS: dict[str, Callable[[World], object]] = {
    "sum of 1 value": lambda w: w.all_reduce([1.0]),
    "sum of 3 values": lambda w: w.all_reduce([1.0] * 3),
    "sum of 100 values": lambda w: w.all_reduce([1.0] * 100),
    "max of 1 value": lambda w: w.all_reduce([1.0], "max"),
    "all-gather of texts": lambda w: w.all_gather_text("a"),
    "broadcast of a text": lambda w: w.broadcast_text(_LONG),
    "broadcast of 4 elements of float64 from rank 0": lambda w: w.broadcast(_buffer(4)),
    "broadcast of 4 elements of float64 from rank 1": lambda w: w.broadcast(_buffer(4), 1),
    "broadcast of 8 elements of float32 from rank 0": lambda w: w.broadcast(_buffer(8, np.float32)),
    "all-gather of 6 elements of float64": lambda w: w.all_gather(_buffer(6)),
    "wait for every rank": lambda w: w.barrier(),
    "opening of a channel for one": lambda w: w.open_channel("one", window=1),
    "opening of a channel for two": lambda w: w.shared_channel("two"),
}


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(_CALLS, 2)))
def test_two_different_calls_never_mix_and_all_ranks_name_both(one: str, other: str) -> None:
    def differ(world: World) -> list[float]:
        with raises(MismatchError, "ranks-in-different-calls") as raised:
            _CALLS[one if world.rank == 1 else other](world)
        message = str(raised.value)
        assert one in message and other in message, message
        assert message.count(f"{__file__}:") == 2, message
        return world.all_reduce([world.rank])  # the world is in order all the same

    assert run_ranks(3, differ) == [[3.0]] * 3


def test_the_ranks_in_each_call_are_named() -> None:
    def differ(world: World) -> None:
        said = "ranks 0, 2 (fakehost): world.barrier()"
        with raises(MismatchError, "ranks-in-different-calls", said):
            world.barrier() if world.rank != 1 else world.all_reduce([1.0])

    run_ranks(3, differ)


def test_calls_with_another_name_do_not_mix_although_they_exchange_the_same() -> None:
    def differ(world: World) -> None:
        with raises(MismatchError, "ranks-in-different-calls") as raised:
            if world.is_root:
                with world.named_call("optimizer.clip_grad_norm_()"), world.named_call("inner"):
                    world.all_reduce([1.0])
            else:
                world.all_reduce([1.0])
        message = str(raised.value)
        assert "optimizer.clip_grad_norm_() (sum of 1 value), called at" in message
        assert "world.all_reduce() (sum of 1 value), called at" in message
        assert "call clip_grad_norm_() on every rank" in message

    run_ranks(2, differ)


def test_one_call_from_different_places_is_the_same_call() -> None:
    def meet(world: World) -> list[str]:
        if world.is_root:
            return world.all_gather_text("0")
        return world.all_gather_text("1")

    assert run_ranks(2, meet) == [["0", "1"]] * 2


@pytest.mark.parametrize("progress", ["thread", "poll"])
@pytest.mark.parametrize("num_values", [0, 1, 14, 15, 300])
def test_values_are_reduced_whether_they_fit_the_first_message_or_not(
    num_values: int, progress: ProgressMode
) -> None:
    def reduce(world: World) -> list[list[float]]:
        values = [world.rank + 0.1 * index for index in range(num_values)]
        return [world.all_reduce(values, op) for op in ("sum", "max", "min")]

    indices = range(num_values)
    expected = [
        [3 + 0.3 * index for index in indices],
        [2 + 0.1 * index for index in indices],
        [0.1 * index for index in indices],
    ]
    for seen in run_ranks(3, reduce, progress=progress):
        for own, wanted in zip(seen, expected, strict=True):
            assert own == pytest.approx(wanted, rel=1e-15)


def test_few_values_are_reduced_in_rank_order_and_keep_nan() -> None:
    def reduce(world: World) -> list[float]:
        own = [1e16, 1.0, -1e16][world.rank]
        return world.all_reduce([own]) + world.all_reduce([math.nan if own == 1.0 else own], "max")

    for total, largest in run_ranks(3, reduce):
        assert total == (1e16 + 1.0) - 1e16
        assert math.isnan(largest)


@pytest.mark.parametrize("text", ["", "short", _LONG, "\0" * 113, "\udc80" * 112])
def test_texts_arrive_whole_whether_they_fit_the_first_message_or_not(text: str) -> None:
    def tell(world: World) -> tuple[list[str], str]:
        own = text if world.rank == 1 else f"{world.rank}"
        return world.all_gather_text(own), world.broadcast_text(text if world.is_root else None)

    assert run_ranks(3, tell) == [(["0", text, "2"], text)] * 3


_LOOKING = """
import gc, threading, time
from dearmpi.comm.api.call import stack_of

class Garbage:
    def __init__(self):
        self.own = self

    def __del__(self):
        time.sleep(1e-4)  # lets another thread run

def begin_and_end():
    while not is_over.is_set():
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

is_over = threading.Event()
other = threading.Thread(target=begin_and_end)
other.start()
gc.set_threshold(1)
for _ in range(100):
    Garbage()
    stack_of(threading.get_ident())
gc.set_threshold(700)
is_over.set()
print(gc.isenabled())
"""


def test_a_look_at_a_stack_while_threads_begin_and_end_and_garbage_is_collected_returns() -> None:
    command = [sys.executable, "-c", _LOOKING]
    assert subprocess.check_output(command, text=True, timeout=120) == "True\n"


def test_the_place_of_an_error_is_the_users_line_even_below_generated_code() -> None:
    with pytest.raises(ConfigError) as raised:
        EngineConfig(shards="whole", gather="gradients")
    place = f"{__file__}:{raised.tb.tb_lineno}, in {raised.tb.tb_frame.f_code.co_name}"
    assert origin_of(raised.value) == place


def test_the_place_of_an_error_may_be_in_a_program_without_a_file() -> None:
    program = compile("def train():\n    raise ValueError\ntrain()", "<string>", "exec")
    with pytest.raises(ValueError) as raised:
        exec(program, {"__name__": "__main__"})
    assert origin_of(raised.value) == "<string>:2, in train"


def test_a_stack_names_the_line_that_enters_a_context_not_the_library_that_does() -> None:
    @contextlib.contextmanager
    def look() -> Iterator[tuple[str, ...]]:
        yield stack_of(threading.get_ident())

    with look() as stack:
        assert not any("contextlib.py" in place for place in stack), stack
