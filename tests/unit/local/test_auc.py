"""The area under the ROC curve: as a number, as a loss, and trained with few exchanges."""

from __future__ import annotations

import copy
import math
import warnings
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dearmpi import (
    AucLoss,
    BalancedBatches,
    Codasca,
    DistributedOptimizer,
    LocalOptimizer,
    PrimalDual,
    auc_of,
)
from dearmpi.comm.world import World
from dearmpi.errors import CheckpointError, ConfigError, UsageError
from dearmpi.local.area import area_under
from dearmpi.train.tasks.auc import Scorer
from dearmpi.train.tasks.task_registry import build_task
from tests.codes import raises
from tests.fakes.ranks import run_ranks


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=40))
def test_the_area_counts_pairs_and_half_of_ties(samples: list[tuple[int, bool]]) -> None:
    scores = torch.tensor([float(score) for score, _ in samples])
    labels = torch.tensor([int(label) for _, label in samples])
    pairs = [
        1.0 if high > low else 0.5 if high == low else 0.0
        for high, one in samples
        for low, other in samples
        if one and not other
    ]
    found = area_under(scores, labels)
    if not pairs:
        assert math.isnan(found)
        return
    assert found == pytest.approx(sum(pairs) / len(pairs), abs=1e-15)
    metrics = pytest.importorskip("sklearn.metrics")
    assert found == pytest.approx(metrics.roc_auc_score(labels, scores), abs=1e-12)


def test_the_area_is_of_all_ranks_and_no_mean_of_theirs() -> None:
    scores, labels = torch.tensor([0.1, 0.9, 0.2, 0.3, 0.2]), torch.tensor([0, 0, 1, 1, 0])

    def measure(world: World) -> float:
        part = slice(0, 2) if world.rank == 0 else slice(2, 5)
        return auc_of(scores[part], labels[part], world)

    expected = area_under(scores, labels)
    assert run_ranks(2, measure) == [expected, expected]
    with raises(ConfigError, "wrong-type"):
        auc_of(torch.zeros(3), torch.zeros(2))


def random_batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(40, generator=generator, dtype=torch.float64)
    return scores, (torch.rand(40, generator=generator) < 0.3).long()


def test_at_its_optimum_the_loss_is_that_of_all_pairs() -> None:
    scores, labels = random_batch()
    share = float(labels.double().mean())
    loss = AucLoss(share).double()
    high, low = scores[labels > 0], scores[labels == 0]
    with torch.no_grad():
        loss.a.fill_(high.mean())
        loss.b.fill_(low.mean())
        loss.alpha.fill_(low.mean() - high.mean())
    found = loss(scores, labels)
    pairs = (1 - high[:, None] + low[None]).square().mean()
    weight = share * (1 - share)
    assert found.item() + weight == pytest.approx(float(weight * pairs), abs=1e-10)
    found.backward()
    for param in loss.parameters():
        assert param.grad is not None and abs(float(param.grad)) < 1e-12


@pytest.mark.parametrize("margin", [None, 1.0])
def test_gradients_are_differences_and_ascend_in_alpha(margin: float | None) -> None:
    scores, labels = random_batch()
    loss = AucLoss(0.3, margin).double()
    with torch.no_grad():
        for param, value in zip(loss.parameters(), (0.4, 0.2, 0.7), strict=True):
            param.fill_(value)
    loss(scores, labels).backward()
    for name, param in loss.named_parameters():
        values = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                param.add_(step)
                values.append(float(loss(scores, labels)))
                param.sub_(step)
        slope = (values[0] - values[1]) / 2e-6
        assert param.grad is not None
        assert float(param.grad) == pytest.approx(-slope if name == "alpha" else slope, abs=1e-8)


def test_with_a_margin_it_is_written_out() -> None:
    """p (1-p) m - ... as the margin form of arXiv 2012.03173, sample by sample."""
    scores, labels = torch.tensor([0.8, 0.3, 0.6], dtype=torch.float64), torch.tensor([1, 0, 0])
    loss = AucLoss(0.25, 1.0).double()
    with torch.no_grad():
        loss.a.fill_(0.5)
        loss.b.fill_(0.125)
        loss.alpha.fill_(2.0)
    expected = 0.75 * 0.3**2 / 3 + 0.25 * (0.175**2 + 0.475**2) / 3
    expected += 2 * 2.0 * (0.1875 + (0.25 * 0.9 - 0.75 * 0.8) / 3) - 0.1875 * 4
    assert float(loss(scores, labels)) == pytest.approx(expected, abs=1e-12)
    with torch.no_grad():
        loss.alpha.fill_(-1.0)  # below the bound counts as the bound, and can come back
    found = loss(scores, labels)
    assert float(found) == pytest.approx(
        0.75 * 0.3**2 / 3 + 0.25 * (0.175**2 + 0.475**2) / 3, abs=1e-12
    )


RECORDED = [  # margin; a, b, alpha; the loss; its gradients by scores, a, b and alpha
    (
        *(1.0, (0.5, 0.125, 2.0), -0.42441809),
        (-0.38160002, 0.35440004, 0.39280003, -0.41520002, 0.31920001),
        (-0.16320002, -0.10640000, -0.71680003),
    ),
    (
        *(0.6, (0.4, 0.3, 0.25), 0.05443199),
        (0.06240000, 0.04640000, 0.08480000, 0.02880000, 0.01120000),
        (-0.21120000, -0.02239999, -0.06880002),
    ),
]


@pytest.mark.parametrize(("margin", "at", "value", "of_scores", "of_own"), RECORDED)
def test_with_a_margin_it_is_that_of_libauc(
    margin: float, at: Any, value: float, of_scores: Any, of_own: Any
) -> None:
    """Of AUCMLoss v1 of libauc 1.4.0, whose optimizer turns the sign of alpha's gradient itself."""
    labels = torch.tensor([1, 0, 0, 1, 0])
    scores = torch.tensor([0.91, 0.34, 0.58, 0.77, 0.12], requires_grad=True)
    loss = AucLoss(0.4, margin)
    with torch.no_grad():
        for param, start in zip((loss.a, loss.b, loss.alpha), at, strict=True):
            param.fill_(start)
    found = loss(scores, labels)
    found.backward()
    assert float(found) == pytest.approx(value, abs=1e-6)
    assert scores.grad is not None
    assert scores.grad.tolist() == pytest.approx(of_scores, abs=1e-6)
    grads = [float(param.grad) for param in (loss.a, loss.b, loss.alpha)]  # type: ignore[arg-type]
    assert grads == pytest.approx((*of_own[:2], -of_own[2]), abs=1e-6)


def test_a_batch_of_one_class_warns_once_and_leaves_alpha_alone() -> None:
    loss = AucLoss(0.5)
    with pytest.warns(UserWarning, match="one class"):
        loss(torch.rand(4), torch.ones(4)).backward()
    assert loss.alpha.grad is not None and float(loss.alpha.grad) == 0
    assert loss.a.grad is not None and float(loss.a.grad) != 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(torch.rand(4), torch.zeros(4))


def test_batches_have_both_classes_and_use_all_samples() -> None:
    labels = torch.tensor([1] * 6 + [0] * 50)
    seen: list[int] = []
    for rank in range(2):
        batches = BalancedBatches(labels, 8, 0.25, rank=rank, size=2, seed=3)
        drawn = list(batches)
        assert len(drawn) == len(batches) == 5
        assert all(int(labels[batch].sum()) == 2 and len(batch) == 8 for batch in drawn)
        assert drawn != list(batches)
        batches.set_epoch(0)
        assert drawn == list(batches)
        seen += [index for batch in drawn for index in batch]
    assert set(seen) == set(range(56))


def test_all_ranks_have_as_many_batches_from_any_seed() -> None:
    labels = [1] * 21 + [0] * 4  # the larger class is 11 samples on rank 0, and 10 on rank 1
    both = [BalancedBatches(labels, 2, rank=rank, size=2, seed=2**40) for rank in range(2)]
    drawn = [list(batches) for batches in both]
    assert [len(batches) for batches in both] == [len(rows) for rows in drawn] == [11, 11]
    assert {index for rows in drawn for row in rows for index in row} == set(range(25))


def test_a_closure_is_refused() -> None:
    optimizer = PrimalDual([nn.Parameter(torch.zeros(1))])
    with raises(UsageError, "local-steps-forbid", "closure"):
        optimizer.step(lambda: 0.0)


def test_a_stage_begins_for_a_parameter_that_some_steps_do_not_use() -> None:
    """Steps 1, 2 and 3 are of the stages 0, 0 and 1; the second parameter is used in 1 and 3."""
    params = [nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2)]
    optimizer = PrimalDual(params, lr=0.3, gamma=2.0, stage_steps=2, decay=3.0, clip=None)
    for uses in (True, False, True):
        params[0].grad = torch.ones_like(params[0])
        params[1].grad = torch.ones_like(params[1]) if uses else None
        optimizer.step()
    first = -0.3
    second = first - 0.3 * (1 + first / 2)  # pulled towards 0
    assert params[0].item() == pytest.approx(second - 0.1, abs=1e-15)  # its stage begins there
    assert params[1].item() == pytest.approx(first - 0.1, abs=1e-15)


def test_a_stage_begins_where_the_last_one_ended() -> None:
    param, dual = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(0.5))
    dual.is_dual, dual.least = True, 0.0  # type: ignore[attr-defined]
    optimizer = PrimalDual([param, dual], lr=0.3, gamma=2.0, stage_steps=2, decay=3.0, clip=None)
    value, other, start = 1.0, 0.5, 1.0
    for step in range(4):
        param.grad, dual.grad = torch.tensor(1.0), torch.tensor(1.0)
        optimizer.step()
        start = value if step == 2 else start
        lr = 0.3 if step < 2 else 0.1
        value -= lr * (1.0 + (value - start) / 2.0)
        other = max(0.0, other - lr)
        assert (float(param), float(dual)) == pytest.approx((value, other), abs=1e-6)


def test_gradients_are_clipped_by_their_norm_over_all_groups() -> None:
    """3, 4 and 12 have the norm 13; a group without a bound keeps its gradient."""
    params = [nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(3)]
    groups = [{"params": params[0]}, {"params": params[1]}, {"params": params[2], "clip": None}]
    optimizer = PrimalDual(groups, lr=1.0, gamma=math.inf, clip=1.0)
    for param, grad in zip(params, (3.0, 4.0, 12.0), strict=True):
        param.grad = torch.full_like(param, grad)
    optimizer.step()
    found = [float(param) for param in params]
    assert found == pytest.approx([-3 / 13, -4 / 13, -12.0], abs=1e-6)
    assert params[0].grad is not None and float(params[0].grad) == 3.0


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Train with a tenth of 0-4: features, labels, digits; held-out features, labels."""
    datasets = pytest.importorskip("sklearn.datasets")
    images, targets = datasets.load_digits(return_X_y=True)
    x, kinds = torch.tensor(images).float() / 16, torch.tensor(targets)
    labels, test = (kinds < 5).long(), torch.arange(len(x)) % 5 == 0
    kept = (~test) & ((labels == 0) | (torch.arange(len(x)) % 9 == 1))
    return x[kept], labels[kept], kinds[kept], x[test], labels[test]


def scorer(width: int) -> Scorer:
    """The same at each call; ranks are threads, which share torch's generator."""
    model, generator = Scorer(64, width, AucLoss(0.5)), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.layers.parameters():
            bound = param.shape[-1] ** -0.5
            param.uniform_(-bound, bound, generator=generator)
    return model


def train(world: World, *, every: int, kind: str, by_label: bool = False, steps: int) -> float:
    """The held-out area after ``steps``."""
    x, y, kinds, test_x, test_y = digits()
    model = scorer(32)
    inner = PrimalDual(model.parameters(), lr=2.0, stage_steps=2 * steps // 3)
    if kind == "codasca":
        optimizer: Any = Codasca(inner, model, sync_every=every, world=world)
    else:
        optimizer = LocalOptimizer.average(inner, model, sync_every=every, world=world)
    own = torch.arange(len(x))
    if by_label:
        of_rank = (kinds % 5 == world.rank) if world.rank < 3 else kinds % 5 >= 3
        own = of_rank.nonzero()[:, 0]
        batches = BalancedBatches(y[own], 16, seed=world.rank)
    else:
        batches = BalancedBatches(y, 16, rank=world.rank, size=world.size)
    taken = 0
    while taken < steps:
        for batch in batches:
            chosen = own[batch]
            optimizer.zero_grad()
            model((x[chosen], y[chosen])).backward()
            optimizer.step()
            taken += 1
            if taken == steps:
                break
    with optimizer.at_anchor(), torch.no_grad():
        part = slice(world.rank, None, world.size)
        area = auc_of(model.score(test_x[part]), test_y[part], world)
    optimizer.close()
    return area


@pytest.mark.slow
def test_few_exchanges_cost_little_area() -> None:
    areas = [
        run_ranks(4, partial(train, every=every, kind="coda", steps=480))[0] for every in (1, 8, 32)
    ]
    assert areas[0] > 0.97
    assert all(area > areas[0] - 0.005 for area in areas[1:])


@pytest.mark.parametrize(
    ("steps", "least"), [(96, 0.91), pytest.param(480, 0.97, marks=pytest.mark.slow)]
)
def test_corrected_gradients_serve_ranks_with_other_classes(steps: int, least: float) -> None:
    plain, corrected = (
        run_ranks(4, partial(train, every=32, kind=kind, by_label=True, steps=steps))[0]
        for kind in ("coda", "codasca")
    )
    assert corrected >= plain
    assert corrected > least


def test_with_equal_data_nothing_is_corrected() -> None:
    def compare(world: World) -> None:
        x, y, *_ = digits()
        models = []
        for kind in ("coda", "codasca"):
            model = scorer(8).double()
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer: Any = (
                Codasca(inner, model, sync_every=4, world=world)
                if kind == "codasca"
                else LocalOptimizer.average(inner, model, sync_every=4, world=world)
            )
            for step in range(10):
                optimizer.zero_grad()
                batch = slice(40 * step, 40 * step + 40)
                model((x[batch].double(), y[batch])).backward()
                optimizer.step()
            optimizer.close()
            models.append(model)
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)

    run_ranks(2, compare)


@pytest.mark.parametrize("clip", [None, 0.4])
def test_corrections_are_means_of_the_gradients_that_ranks_step_by(clip: float | None) -> None:
    """From the first round on, and of clipped gradients where the steps are of clipped ones."""
    size, every, lr = 3, 4, 0.2
    generator = torch.Generator().manual_seed(2)
    curvature = torch.rand(size, 5, generator=generator, dtype=torch.float64) + 0.5
    center = torch.randn(size, 5, generator=generator, dtype=torch.float64)

    def train(world: World) -> Tensor:
        model: Any = nn.Module()
        model.at = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        model.none = nn.Parameter(torch.zeros(0, dtype=torch.float64))
        model.none.grad = torch.zeros_like(model.none)
        inner = PrimalDual([model.at, model.none], lr=lr, gamma=math.inf, clip=clip)
        optimizer = Codasca(inner, model, sync_every=every, world=world)
        for _ in range(3 * every):
            model.at.grad = curvature[world.rank] * (model.at.detach() - center[world.rank])
            optimizer.step()
        optimizer.close()
        found: Tensor = model.at.detach()
        return found

    points = torch.zeros(size, 5, dtype=torch.float64)
    own = torch.zeros(size, 5, dtype=torch.float64)
    was_clipped = False
    for _ in range(3):
        total = torch.zeros_like(own)
        for _ in range(every):
            grads = curvature * (points - center)
            if clip is not None:
                scale = (clip / (grads.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1.0)
                was_clipped |= bool((scale < 0.9).any())
                grads = grads * scale
            total += grads
            points = points - lr * (grads - own + own.mean(0))
        own, points = total / every, points.mean(0).repeat(size, 1)
    assert was_clipped == (clip is not None)
    for found in run_ranks(size, train):
        torch.testing.assert_close(found, points[0], rtol=1e-10, atol=1e-12)


def test_corrected_training_resumes_bit_for_bit() -> None:
    """In the middle of a round, by ranks that have other data."""

    def build(world: World) -> tuple[nn.Module, Codasca]:
        model = scorer(4)
        inner = PrimalDual(model.parameters(), lr=0.5, stage_steps=6)
        return model, Codasca(inner, model, sync_every=3, world=world)

    def go_on(model: nn.Module, optimizer: Codasca, steps: range, rank: int) -> None:
        x, y, *_ = digits()
        for step in steps:
            optimizer.zero_grad()
            batch = slice(40 * (2 * step + rank), 40 * (2 * step + rank) + 20 * (rank + 1))
            model((x[batch], y[batch])).backward()
            optimizer.step()

    def compare(world: World) -> None:
        model, optimizer = build(world)
        go_on(model, optimizer, range(5), world.rank)
        saved = copy.deepcopy(optimizer.state_dict())
        go_on(model, optimizer, range(5, 10), world.rank)
        again, resumed = build(world)
        other = {**saved, "local": {**saved["local"], "rank": 0}}
        with raises(CheckpointError, "state-of-other-model", "rank 1", "rank 0"):
            resumed.load_state_dict(other)
        plain = {key: saved["local"][key] for key in saved["local"] if key != "sync_every"}
        with raises(CheckpointError, "state-of-other-model", "corrections"):
            resumed.load_state_dict({**saved, "local": plain})
        resumed.load_state_dict(saved)
        go_on(again, resumed, range(5, 10), world.rank)
        for one, two in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(one, two)
        optimizer.close()
        resumed.close()

    run_ranks(2, compare)


@pytest.mark.parametrize("kind", ["SGD", "PrimalDual"])
def test_corrections_move_what_a_rank_does_not_use(kind: str) -> None:
    """Its gradient is zero there, and that of all ranks is not."""
    size, every, lr = 3, 4, 0.2
    center = torch.tensor([[3.0], [-1.0], [0.0]], dtype=torch.float64)
    curvature = torch.tensor([[1.0], [2.0], [0.0]], dtype=torch.float64)

    def train(world: World) -> Tensor:
        model: Any = nn.Module()
        model.at = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        made: Any = (
            torch.optim.SGD([model.at], lr=lr)
            if kind == "SGD"
            else PrimalDual([model.at], lr=lr, gamma=math.inf, clip=None)
        )
        optimizer = Codasca(made, model, sync_every=every, world=world)
        for _ in range(3 * every):
            optimizer.zero_grad()
            if world.rank < 2:
                model.at.grad = curvature[world.rank] * (model.at.detach() - center[world.rank])
            optimizer.step()
            assert world.rank < 2 or model.at.grad is None
        optimizer.close()
        found: Tensor = model.at.detach()
        return found

    points, own = torch.zeros(size, 1, dtype=torch.float64), torch.zeros(size, 1).double()
    for _ in range(3):
        total = torch.zeros_like(own)
        for _ in range(every):
            slopes = curvature * (points - center)
            points = points - lr * (slopes - own + own.mean(0))
            total += slopes
        points, own = points.mean(0).expand(size, -1), total / every
    for found in run_ranks(size, train):
        torch.testing.assert_close(found, points[0], rtol=1e-12, atol=0.0)


def test_on_other_ranks_corrections_begin_anew_and_cancel() -> None:
    """Two ranks stop in the middle of a round, and three go on."""

    def build(world: World) -> tuple[nn.Module, Codasca]:
        model = scorer(4)
        return model, Codasca(
            torch.optim.SGD(model.parameters(), 0.5), model, sync_every=3, world=world
        )

    def go_on(model: nn.Module, optimizer: Codasca, steps: int, rank: int) -> None:
        x, y, *_ = digits()
        for step in range(steps):
            optimizer.zero_grad()
            batch = slice(40 * (3 * step + rank), 40 * (3 * step + rank + 1))
            model((x[batch], y[batch])).backward()
            optimizer.step()

    def begin(world: World) -> Any:
        model, optimizer = build(world)
        go_on(model, optimizer, 5, world.rank)
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.close()
        return saved

    def resume(world: World) -> list[Tensor]:
        model, optimizer = build(world)
        optimizer.load_state_dict(copy.deepcopy(saved))
        for param, value in zip(model.parameters(), saved["local"]["anchor"].values(), strict=True):
            assert torch.equal(param, value)
        assert all(not one.any() for one in corrections(optimizer))
        go_on(model, optimizer, 1, world.rank)  # the last of the round
        found = corrections(optimizer)
        go_on(model, optimizer, 2, world.rank)
        optimizer.close()
        return found

    def corrections(optimizer: Codasca) -> list[Tensor]:
        own = optimizer.state_dict()["local"]["own"]
        return [tensors["correction"] for tensors in own.values()]

    saved = run_ranks(2, begin)[0]
    with pytest.warns(UserWarning, match="corrections of 2 ranks"):
        of_ranks = run_ranks(3, resume)
    for of_param in zip(*of_ranks, strict=True):
        torch.testing.assert_close(sum(of_param), torch.zeros_like(of_param[0]), atol=1e-6, rtol=0)
    assert any(one.abs().max() > 1e-3 for one in of_ranks[0])


def test_an_exchange_in_each_step_equals_averaged_gradients() -> None:
    def compare(world: World) -> None:
        x, y, *_ = digits()
        models = []
        for kind in ("local", "dense"):
            model = scorer(8).double()
            inner = PrimalDual(model.parameters(), lr=0.1, gamma=math.inf, clip=None)
            if kind == "dense":
                inner = torch.optim.SGD(model.parameters(), lr=0.1)  # type: ignore[assignment]
                optimizer: Any = DistributedOptimizer(inner, model, world=world)
            else:
                optimizer = LocalOptimizer.average(inner, model, sync_every=1, world=world)
            for step in range(6):
                optimizer.zero_grad()
                first = 80 * step + 40 * world.rank
                model((x[first : first + 40].double(), y[first : first + 40])).backward()
                optimizer.step()
            optimizer.close()
            models.append({k: v.detach().clone() for k, v in model.named_parameters()})
        for name, value in models[0].items():
            torch.testing.assert_close(value, models[1][name], rtol=1e-9, atol=1e-11)

    run_ranks(2, compare)


@pytest.mark.parametrize("name", ["breast-cancer", "digits"])
def test_tasks_tell_the_held_out_area(name: str) -> None:
    pytest.importorskip("sklearn.datasets")
    task = build_task(f"auc:{name}", {"width": "4", "margin": "1.0"})
    batch = (task.train_data.images[:50], task.train_data.labels[:50])
    assert math.isfinite(float(task.loss(task.model, batch)))
    assert task.summarize is not None
    (line,) = task.summarize(task.model)
    assert 0 <= float(line.removeprefix("held-out AUC: ")) <= 1
