"""Sparse gradients: nothing is lost, wherever training is read, saved, resumed or laid out anew."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dearmpi import DistributedOptimizer, EngineConfig
from dearmpi.comm.algorithms.registry import CollectiveAlgorithms
from dearmpi.comm.algorithms.scratch import Scratch
from dearmpi.comm.world import World
from dearmpi.config import Compress, Feedback, Gather
from dearmpi.engine.bucket import bucket
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.bucket.buffers import Arena
from dearmpi.engine.codec.residual import ErrorFeedback
from dearmpi.engine.codec.sparse import RandomBlocks, RandomElements
from dearmpi.errors import ConfigError, UsageError
from dearmpi.plan.data.layout import build_layout, spec_of
from dearmpi.span import Span, Track
from tests.codes import raises
from tests.combinations import turns_of
from tests.fakes.ranks import run_ranks
from tests.mpi.models import fill
from tests.mpi.oracle import copies, fingerprint
from tests.unit.engine.test_compress import loss_of, make_wide_model, regress

SPARSE: list[Compress] = ["random-block", "random-k", "topk", "block-topk"]
RANDOM: list[Compress] = ["random-block", "random-k"]


@pytest.fixture(autouse=True)
def _small_buckets_count(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(bucket, "_LEAST_COMPRESSED", 1)
    yield


def codec_of(kind: type[RandomBlocks | RandomElements], numel: int, density: float) -> Any:
    param = nn.Parameter(torch.zeros(numel))
    layout = build_layout([[spec_of(param, "p")]], 3)
    arenas = Arena(layout), Arena(layout, zeroed=False)
    runtime = BucketRuntime(
        layout.buckets[0], [param], rank=0, gradients=arenas[0], parameters=arenas[1]
    )
    feedback = ErrorFeedback(3, keeps=True)
    algorithm = CollectiveAlgorithms("ring")
    return kind(runtime, algorithm, Scratch(), density=density, feedback=feedback)


@pytest.mark.parametrize("numel", [1, 7, 300, 1000])
@pytest.mark.parametrize("density", [1.0, 0.3, 0.1, 0.011])
def test_each_block_has_its_turn_in_each_sweep(numel: int, density: float) -> None:
    codec, shard = codec_of(RandomBlocks, numel, density), math.ceil(numel / 3)
    sent = max(1, math.ceil(density * shard))
    num_turns = math.ceil(shard / sent)
    orders = []
    for sweep in range(3):
        chosen = [codec.choose(sweep * num_turns + turn) for turn in range(num_turns)]
        elements = [element for part in chosen for element in range(shard)[part]]
        assert sorted(elements) == list(range(shard))
        assert all(0 < part.stop - part.start <= sent for part in chosen)
        orders.append(elements)
    assert num_turns < 10 or orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("numel", [1, 7, 300, 1000])
@pytest.mark.parametrize("density", [1.0, 0.3, 0.1, 0.011])
def test_elements_are_drawn_without_repetition(numel: int, density: float) -> None:
    codec, shard = codec_of(RandomElements, numel, density), math.ceil(numel / 3)
    counts = torch.zeros(shard)
    for turn in range(400):
        chosen = codec.choose(turn)
        assert len(chosen) == max(1, math.ceil(density * shard))
        assert bool((chosen.diff() > 0).all()) and 0 <= int(chosen[0]) <= int(chosen[-1]) < shard
        counts[chosen] += 1
    expected = 400 * len(chosen) / shard
    assert bool(((counts - expected).abs() < 6 * math.sqrt(expected) + 1).all())


def whole_gradients(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(7 * step + rank)
    return torch.randint(-8, 9, (20, 31), generator=generator).float()


def mean_of(steps: range, size: int) -> Tensor:
    """The sum over steps of what ranks have in the mean."""
    parts = [whole_gradients(step, rank) for step in steps for rank in range(size)]
    return torch.stack(parts).sum(0) / size


def train_on_whole_numbers(world: World, steps: range, start: Any = None, **settings: Any) -> Any:
    """SGD on gradients that do not depend on parameters; what would be saved."""
    model = nn.Linear(31, 20, bias=False)
    nn.init.zeros_(model.weight)
    if start is not None:
        model.load_state_dict(start[0])
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = DistributedOptimizer(inner, model, world=world, **settings)
    if start is not None:
        optimizer.load_state_dict(copy.deepcopy(start[1]))
    for step in steps:
        optimizer.zero_grad()
        (model.weight * whole_gradients(step, world.rank)).sum().backward()
        optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    found = copies(model), state
    optimizer.close()
    return found


def owed_and_done(state: dict[str, Any]) -> Tensor:
    """All that gradients have led to, and will."""
    entries = state["state"][0]
    done: Tensor = entries["master"] - entries["owed"]
    return done


@turns_of(compress=SPARSE, density=[1.0, 0.3, 0.05], size=[2, 4], steps=[1, 5, 30])
def test_no_part_of_a_gradient_is_lost(
    compress: Compress, density: float, size: int, steps: int
) -> None:
    """Whole numbers over a power of two are exact, so that the sum is."""
    settings: dict[str, Any] = {"compress": compress, "density": density}
    found = run_ranks(size, lambda w: train_on_whole_numbers(w, range(steps), **settings))
    for _, state in found:
        assert torch.equal(owed_and_done(state), -mean_of(range(steps), size))
        assert (density == 1.0) != bool(state["state"][0]["owed"].any())


@pytest.mark.parametrize("compress", SPARSE)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_run_goes_on_on_any_number_of_ranks_and_loses_nothing(
    compress: Compress, size: int
) -> None:
    settings: dict[str, Any] = {"compress": compress, "density": 0.1}
    start = run_ranks(4, lambda w: train_on_whole_numbers(w, range(5), **settings))[0]
    later = run_ranks(size, lambda w: train_on_whole_numbers(w, range(5, 9), start, **settings))
    dense = run_ranks(size, lambda w: train_on_whole_numbers(w, range(5, 9), start))
    total = mean_of(range(5), 4) + mean_of(range(5, 9), size)
    assert torch.equal(owed_and_done(later[0][1]), -total)
    assert torch.equal(dense[0][0]["weight"], -total), "what was owed counts in the first step"


@turns_of(
    compress=SPARSE,
    inner=["plain", "sgd"],
    error_feedback=["ef14", "none", "ef21"],
    compress_after=[0, 8],
)
def test_a_resumed_run_goes_on_bit_by_bit(
    compress: Compress, inner: str, error_feedback: Feedback, compress_after: int
) -> None:
    """As the run does of which the state was read."""

    def make(world: World) -> tuple[nn.Module, Any]:
        model = make_wide_model()
        rates: dict[str, Any] = {"momentum": 0.9} if inner == "sgd" else {}
        plain = torch.optim.SGD(model.parameters(), lr=0.01, **rates)
        settings: dict[str, Any] = {"compress": compress, "density": 0.1, "bucket_cap_mb": 0.004}
        settings |= {"error_feedback": error_feedback, "compress_after": compress_after}
        return model, DistributedOptimizer(plain, model, world=world, **settings)

    def first(world: World) -> Any:
        model, optimizer = make(world)
        regress(model, optimizer, world, steps=6)
        saved = copy.deepcopy((copies(model), optimizer.state_dict()))
        regress(model, optimizer, world, steps=6)
        optimizer.close()
        return saved, fingerprint(copies(model))

    begun = run_ranks(3, first)
    saved = begun[0][0]

    def second(world: World) -> str:
        model, optimizer = make(world)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        regress(model, optimizer, world, steps=6)
        optimizer.close()
        return fingerprint(copies(model))

    assert {digest for _, digest in begun} == set(run_ranks(3, second))


@pytest.mark.parametrize("compress", RANDOM)
def test_without_error_feedback_the_rest_is_dropped(compress: Compress) -> None:
    settings: dict[str, Any] = {"compress": compress, "density": 0.1, "error_feedback": "none"}
    found = run_ranks(2, lambda w: train_on_whole_numbers(w, range(1), **settings))
    entries, whole = found[0][1]["state"][0], mean_of(range(1), 2)
    moved = -entries["master"]
    assert "owed" not in entries
    assert 0.05 < float((moved != 0).float().mean()) < 0.15
    scale = 310 / 31 if compress == "random-k" else 1.0  # so that the mean over steps is right
    assert torch.equal(moved, torch.where(moved == 0, 0.0, whole * scale))


@turns_of(
    compress=["int8", "int4", "powersgd", *SPARSE], gather=["parameters", "gradients"], moves=[0, 1]
)
def test_the_first_steps_are_dense(compress: Compress, gather: Gather, moves: int) -> None:
    """To the bit, also where buckets are laid out anew; the next step is not."""
    if (compress in SPARSE and gather == "gradients") or compress == "powersgd":
        gather = "gradients" if compress == "powersgd" else "parameters"

    def rank(world: World) -> list[list[str]]:
        found = []
        choices: list[dict[str, Any]] = [{}, {"compress": compress, "compress_after": 5}]
        for settings in choices:
            model, digests = make_wide_model(), []
            inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            optimizer = DistributedOptimizer(inner, model, world=world, gather=gather, **settings)
            for step in range(6):
                if step == 3 and moves:
                    optimizer.fuse(0.004)
                generator = torch.Generator().manual_seed(step + 7 * world.rank)
                optimizer.zero_grad()
                model(torch.randn(4, 40, generator=generator)).square().mean().backward()
                optimizer.step()
                optimizer.synchronize()
                digests.append(fingerprint(copies(model)))
            sent = optimizer.traffic.reduced + optimizer.traffic.gathered
            assert (sent < optimizer.traffic.dense) == bool(settings)
            optimizer.close()
            found.append(digests)
        return found

    for dense, compressed in run_ranks(2, rank):
        assert dense[:5] == compressed[:5] and dense[5] != compressed[5]


@pytest.mark.parametrize("compress", SPARSE)
def test_a_new_layout_loses_nothing(compress: Compress) -> None:
    def rank(world: World) -> Any:
        model = nn.Linear(31, 20, bias=False)
        nn.init.zeros_(model.weight)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = DistributedOptimizer(inner, model, world=world, compress=compress, density=0.1)
        for step in range(6):
            if step in (2, 4):
                optimizer.fuse(1.0 + step)
            optimizer.zero_grad()
            (model.weight * whole_gradients(step, world.rank)).sum().backward()
            optimizer.step()
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.close()
        return state

    for state in run_ranks(2, rank):
        assert torch.equal(owed_and_done(state), -mean_of(range(6), 2))


STEPS, LAST, RATE = 150, 20, 0.02


@cache
def dense_loss(size: int) -> float:
    """The sum of all ranks' last losses where one process trains on the batches of all."""
    model, losses = make_wide_model(), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = torch.stack([loss_of(model, step, rank) for rank in range(size)]).mean()
        loss.backward()
        optimizer.step()
        losses.append(size * loss.item())
    return sum(losses[-LAST:])


@turns_of(compress=SPARSE, schedule=["dear", "wfbp", "serial"], size=[2, 3])
def test_replicas_are_equal_and_learn_what_dense_ones_learn(
    compress: Compress, schedule: Any, size: int
) -> None:
    def rank(world: World) -> tuple[dict[str, Tensor], float]:
        model = make_wide_model()
        inner = torch.optim.SGD(model.parameters(), lr=RATE)
        optimizer = DistributedOptimizer(
            inner,
            model,
            world=world,
            schedule=schedule,
            check_every=1,
            compress=compress,
            density=0.1,
        )
        losses = regress(model, optimizer, world, steps=STEPS)
        optimizer.close()
        return copies(model), sum(losses[-LAST:])

    found = run_ranks(size, rank)
    for other, _ in found[1:]:
        assert all(torch.equal(other[name], value) for name, value in found[0][0].items())
    assert sum(loss for _, loss in found) == pytest.approx(dense_loss(size), rel=0.15)


@pytest.mark.parametrize("compress", SPARSE)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_seen_at_once_and_not_kept(
    compress: Compress, bad: float
) -> None:
    def rank(world: World) -> tuple[float, float]:
        model = make_wide_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = DistributedOptimizer(inner, model, world=world, compress=compress)
        norms = []
        for factor in (bad if world.rank == 1 else 1.0, 1.0):
            optimizer.zero_grad()
            (factor * model(torch.ones(2, 40)).sum()).backward()
            norms.append(float(optimizer.clip_grad_norm_(1.0)))
        optimizer.close()
        return norms[0], norms[1]

    for first, second in run_ranks(3, rank):
        assert not math.isfinite(first) and math.isfinite(second)


@pytest.mark.parametrize("compress", SPARSE)
def test_finite_gradients_whose_sum_is_too_large_are_sent(compress: Compress) -> None:
    """Nothing adds up different elements of a gradient."""

    def rank(world: World) -> Tensor:
        model = nn.Linear(40, 40, bias=False)
        nn.init.zeros_(model.weight)
        inner = torch.optim.SGD(model.parameters(), lr=1e-38)
        optimizer = DistributedOptimizer(inner, model, world=world, compress=compress, density=1.0)
        (1e38 * model.weight).sum().backward()
        optimizer.step()
        optimizer.close()
        return model.weight.detach().clone()

    for weight in run_ranks(2, rank):
        torch.testing.assert_close(weight, torch.full_like(weight, -1.0), rtol=0.0, atol=0.01)


def test_what_cannot_be_sparse_is_refused_with_cures() -> None:
    def rank(world: World) -> None:
        model = make_wide_model()
        for inner in (
            torch.optim.Adam(model.parameters()),
            torch.optim.Adagrad(model.parameters()),
            torch.optim.Rprop(model.parameters()),
            torch.optim.RAdam(model.parameters()),
        ):
            cures = ("'ef21'", "'int8'", "torch.optim.SGD")
            with raises(ConfigError, "optimizer-not-linear", *cures):
                DistributedOptimizer(inner, model, world=world, compress="random-block")
        nesterov = torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
        )
        DistributedOptimizer(nesterov, model, world=world, compress="random-k").close()

    run_ranks(2, rank)


@turns_of(compress=SPARSE, way=["dropped", "skipped as nan", "unused", "rolled back", "closed"])
def test_nothing_else_gets_into_what_is_owed_or_out_of_it(compress: Compress, way: str) -> None:
    """Steps on whole numbers, and between them what is to leave no trace."""

    def rank(world: World) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        model = nn.ParameterDict(
            {name: nn.Parameter(torch.zeros(20, 31)) for name in ("often", "seldom")}
        )
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = DistributedOptimizer(
            inner, model, world=world, compress=compress, density=0.1, bucket_cap_mb=1.0
        )

        def backward(step: int, factor: float = 1.0, *, uses_both: bool = True) -> None:
            optimizer.zero_grad()
            gradient = factor * whole_gradients(step, world.rank)
            loss = (model["often"] * gradient).sum()
            if uses_both:
                loss = loss + (model["seldom"] * gradient).sum()
            loss.backward()

        often = seldom = torch.zeros(20, 31)
        saved: Any = None
        for step in range(12):
            uses_both = way != "unused" or step % 3 == 0
            backward(step, uses_both=uses_both)
            optimizer.step()
            often = often + mean_of(range(step, step + 1), 2)
            seldom = seldom + (mean_of(range(step, step + 1), 2) if uses_both else 0.0)
            if step == 5:  # what is owed by now waits with its owners
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), often, seldom))
            if way == "dropped":
                backward(99, 1000.0)
                optimizer.zero_grad()
            if way == "skipped as nan":
                backward(99, math.nan if world.rank else 1.0)
                assert not math.isfinite(float(optimizer.clip_grad_norm_(1.0)))
                optimizer.zero_grad()
            if way == "rolled back" and step == 9:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                often, seldom = saved[2:]
        if way == "closed":
            optimizer.close()
        states = copy.deepcopy(optimizer.state_dict())["state"]
        optimizer.close()
        done = [states[number]["master"] - states[number]["owed"] for number in range(2)]
        return done[0], done[1], -often, -seldom

    for first, second, often, seldom in run_ranks(2, rank):
        assert torch.equal(first, often)
        assert torch.equal(second, seldom)


FEEDBACK: list[dict[str, Any]] = [
    *({"compress": compress, "density": 0.1} for compress in SPARSE),
    {"compress": "powersgd", "powersgd_rank": 1, "gather": "gradients"},
]


@pytest.mark.parametrize("settings", FEEDBACK, ids=lambda one: one["compress"])
def test_what_is_dropped_leaves_the_next_steps_as_they_are(settings: dict[str, Any]) -> None:
    """To the bit: also whose turn it is, after one backprop or two, read or not."""

    def rank(world: World) -> list[Tensor]:
        found = []
        for drops in (False, True):
            model = nn.Linear(31, 20, bias=False)
            nn.init.zeros_(model.weight)
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            optimizer = DistributedOptimizer(inner, model, world=world, **settings)
            for step in range(6):
                for num_backprops in (1, 2) if drops else ():
                    optimizer.zero_grad()
                    for _ in range(num_backprops):
                        (model.weight * whole_gradients(99 + step, world.rank)).sum().backward()
                        if step % 2:
                            optimizer.gradients()
                optimizer.zero_grad()
                (model.weight * whole_gradients(step, world.rank)).sum().backward()
                optimizer.step()
            optimizer.close()
            found.append(model.weight.detach().clone())
        return found

    for plain, interrupted in run_ranks(2, rank):
        assert torch.equal(plain, interrupted) and bool(plain.any())


@pytest.mark.parametrize("settings", FEEDBACK, ids=lambda one: one["compress"])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_clipping_leaves_out_what_no_rank_uses(settings: dict[str, Any], norm_type: float) -> None:
    """What ranks had not sent of it arrives, and waits for its next use as it is."""

    def rank(world: World) -> tuple[float, float, Tensor]:
        model = nn.ParameterDict(
            {name: nn.Parameter(torch.zeros(20, 31)) for name in ("often", "seldom")}
        )
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = DistributedOptimizer(inner, model, world=world, bucket_cap_mb=1.0, **settings)
        gradient = whole_gradients(0, world.rank)
        (1000.0 * model["seldom"] * gradient + model["often"] * gradient).sum().backward()
        optimizer.step()
        for _ in range(3):
            optimizer.zero_grad()
            if world.is_root:  # the other rank's counts as zero
                (model["often"] * gradient).sum().backward()
            norm = float(optimizer.clip_grad_norm_(0.5, norm_type))
            whole = optimizer.gradients()["often"]
            optimizer.step()
        shares = optimizer.traffic.owed_share
        state = optimizer.state_dict()["state"]
        optimizer.close()
        seldom = state[1].get("master", model["seldom"].detach())
        assert shares is not None and 0 < shares < 1
        return norm, float(whole.norm(norm_type)), seldom - state[1]["owed"]

    for norm, after, seldom in run_ranks(2, rank):
        assert 0.5 < norm < 200, "as large as the gradients of what is used"
        assert after == pytest.approx(0.5, rel=1e-5)
        torch.testing.assert_close(seldom, -1000.0 * mean_of(range(1), 2), rtol=1e-5, atol=1e-2)


def test_state_is_not_read_between_backward_and_step() -> None:
    def rank(world: World) -> None:
        model = make_wide_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = DistributedOptimizer(inner, model, world=world, compress="random-k")
        model(torch.ones(2, 40)).sum().backward()
        for read in (optimizer.state_dict, optimizer.local_state):
            with raises(UsageError, "step-missing", "after step()"):
                read()
        optimizer.step()
        optimizer.state_dict()
        optimizer.close()

    run_ranks(2, rank)


class Heard:
    """A recorder."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def add(self, span: Span) -> None:
        self.spans.append(span)


@pytest.mark.parametrize("compress", ["none", "int8", "nonzero", *SPARSE])
def test_traces_show_what_codecs_compute(compress: Compress) -> None:
    def rank(world: World) -> list[Span]:
        model = make_wide_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = DistributedOptimizer(
            inner, model, world=world, compress=compress, bucket_cap_mb=1.0
        )
        heard = optimizer.spans.recorder = Heard()
        regress(model, optimizer, world, steps=1)
        optimizer.close()
        return [span for span in heard.spans if span.track is Track.CODEC]

    for spans in run_ranks(2, rank):
        names = {span.name for span in spans}
        ends = ("RS0", "AG0") if compress != "none" else ()
        assert names == {f"{what} {end}" for what in ("encode", "decode") for end in ends}
        assert all(span.bucket == 0 and span.stop_s >= span.start_s for span in spans)


@pytest.mark.parametrize("read", ["state_dict", "local_state"])
def test_a_rank_that_reads_its_state_alone_is_told(read: str) -> None:
    def rank(world: World) -> None:
        model = make_wide_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = DistributedOptimizer(
            inner, model, world=world, compress="random-block", density=1.0
        )
        regress(model, optimizer, world, steps=1)
        optimizer.synchronize()
        if world.is_root:
            getattr(optimizer, read)()
        else:
            world.all_reduce([1.0])

    with pytest.raises(Exception, match="MismatchError"):
        run_ranks(2, rank)


def test_what_is_owed_is_not_left_out_in_silence() -> None:
    sparse: dict[str, Any] = {"compress": "random-k", "density": 0.1}
    start = run_ranks(2, lambda w: train_on_whole_numbers(w, range(5), **sparse))[0]
    with pytest.warns(UserWarning, match="had not sent"):
        run_ranks(1, lambda w: train_on_whole_numbers(w, range(5, 6), start))


def test_every_rank_takes_up_what_is_owed_where_gradients_are_gathered() -> None:
    sparse: dict[str, Any] = {"compress": "random-k", "density": 0.1}
    start = run_ranks(2, lambda w: train_on_whole_numbers(w, range(5), **sparse))[0]
    owed = start[1]["state"][0]["owed"]
    for model, state in run_ranks(
        2, lambda w: train_on_whole_numbers(w, range(5, 6), start, gather="gradients")
    ):
        assert "owed" not in state["state"].get(0, {}) and bool(owed.any())
        whole = start[1]["state"][0]["master"] - owed - mean_of(range(5, 6), 2)
        torch.testing.assert_close(model["weight"], whole, rtol=0, atol=1e-5)


@turns_of(
    after=[None, {}, {"gather": "gradients"}, {"shards": "whole"}],
    compress=SPARSE,
    scale=[1.0, 64.0],
    size=[3, 2],
)
def test_clipping_bounds_what_is_owed_too(
    after: dict[str, Any] | None, compress: Compress, scale: float, size: int
) -> None:
    """After the state is read, or loaded by a run ``after``, all of it counts in one step."""

    def rank(world: World) -> tuple[float, float, Tensor]:
        model = nn.Linear(31, 20, bias=False)
        nn.init.zeros_(model.weight)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = DistributedOptimizer(inner, model, world=world, compress=compress, density=0.05)
        for step in range(5):
            optimizer.zero_grad()
            (model.weight * whole_gradients(step, world.rank)).sum().backward()
            optimizer.step()
        start = copy.deepcopy(optimizer.state_dict())
        assert bool(start["state"][0]["owed"].any())
        if after is not None:
            optimizer.close()
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            optimizer = DistributedOptimizer(inner, model, world=world, **after)
            optimizer.load_state_dict(start)
        optimizer.follow_loss_scale(lambda: scale)
        optimizer.zero_grad()
        (scale * model.weight * whole_gradients(5, world.rank)).sum().backward()
        optimizer.scale_gradients_(1 / scale)
        norm = float(optimizer.clip_grad_norm_(0.5))
        optimizer.step()
        now = optimizer.state_dict()["state"].get(0, {}).get("master", copies(model)["weight"])
        moved = now - start["state"][0]["master"]
        optimizer.close()
        expected = float((start["state"][0]["owed"] + mean_of(range(5, 6), size)).norm())
        return norm, expected, moved

    for norm, expected, moved in run_ranks(size, rank):
        assert float(moved.norm()) <= 0.5 + 1e-5
        if after is not None:  # then all of the gradient travels
            assert norm == pytest.approx(expected, rel=1e-5)
            assert float(moved.norm()) == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("compress", ["int8", "int4", "nonzero", *SPARSE])
def test_a_default_dtype_changes_nothing(compress: Compress, dtype: torch.dtype) -> None:
    def rank(world: World) -> str:
        model = nn.Linear(40, 60, dtype=torch.float32)
        fill(model)
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = DistributedOptimizer(inner, model, world=world, compress=compress)
        for step in range(3):
            generator = torch.Generator().manual_seed(step + 5 * world.rank)
            data = torch.randn(4, 40, generator=generator, dtype=torch.float32)
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
        found = fingerprint(copies(model))
        optimizer.close()
        return found

    plain, before = run_ranks(2, rank), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert run_ranks(2, rank) == plain
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"density": 0.1}, "setting-without-effect"),
        ({"density": 0.1, "compress": "int8"}, "setting-without-effect"),
        ({"density": 0.0, "compress": "random-k"}, "out-of-range"),
        ({"density": 1.1, "compress": "random-k"}, "out-of-range"),
        ({"density": math.nan, "compress": "random-k"}, "out-of-range"),
        ({"density": "0.1", "compress": "random-k"}, "wrong-type"),
        ({"compress": "random-k", "error_feedback": "ef22"}, "unknown-choice"),
        ({"compress": "int4", "error_feedback": "ef14"}, "setting-without-effect"),
        ({"compress_after": 5}, "setting-without-effect"),
        ({"compress": "nonzero", "compress_after": 5}, "setting-without-effect"),
        ({"compress": "int8", "compress_after": -1}, "out-of-range"),
        ({"compress": "int8", "compress_after": 0.5}, "wrong-type"),
        ({"compress": "random-block", "gather": "gradients"}, "settings-contradict"),
        ({"compress": "random-block", "comm_dtype": "bf16"}, "settings-contradict"),
    ],
)
def test_settings_that_contradict_are_refused(settings: dict[str, Any], code: str) -> None:
    with raises(ConfigError, code):
        EngineConfig(**settings)
