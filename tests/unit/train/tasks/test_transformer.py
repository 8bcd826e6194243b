"""The transformer: causal, sensitive to positions, valid in other precisions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dearmpi.errors import TaskError
from dearmpi.train.tasks.bytes_lm import (
    Transformer,
    TransformerShape,
    generate,
    rotate,
    rotation_angles,
)
from tests.codes import raises


def small(*, tied: bool = False, **changes: int) -> Transformer:
    torch.manual_seed(0)
    sizes = {"vocabulary": 256, "context": 12, "width": 16, "depth": 2, "heads": 2, **changes}
    return Transformer(TransformerShape(**sizes, tied=tied))


def test_no_output_depends_on_later_tokens() -> None:
    model, tokens = small(), torch.arange(12).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 7:] = 200
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_the_order_of_earlier_tokens_matters() -> None:
    model = small()
    one, other = torch.tensor([[5, 9, 3, 7]]), torch.tensor([[9, 5, 3, 7]])
    assert not torch.allclose(model(one)[0, -1], model(other)[0, -1], atol=1e-5)


def test_rotated_products_depend_on_the_distance_alone() -> None:
    torch.manual_seed(0)
    angles, query, key = rotation_angles(32, 8), torch.randn(8), torch.randn(8)
    queries, keys = rotate(query.expand(32, 8), angles), rotate(key.expand(32, 8), angles)
    torch.testing.assert_close(queries[5] @ keys[2], queries[30] @ keys[27])
    assert not torch.allclose(queries[5] @ keys[2], queries[5] @ keys[4])


def test_a_new_model_is_about_as_good_as_guessing() -> None:
    tokens = torch.randint(256, (8, 13), generator=torch.Generator().manual_seed(1))
    logits = small()(tokens[:, :-1]).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(256), rel=0.1)


def test_fp64_and_fp32_agree() -> None:
    model, tokens = small(), torch.arange(12).unsqueeze(0)
    single = model(tokens)
    double = model.double()(tokens)
    assert double.dtype == torch.float64
    torch.testing.assert_close(single.double(), double, rtol=1e-3, atol=1e-4)


def test_tied_weights_are_one_parameter() -> None:
    tied = small(tied=True)
    assert tied.output.weight is tied.embedding.weight
    assert sum(p.numel() for p in small().parameters()) - 256 * 16 == sum(
        p.numel() for p in tied.parameters()
    )


def test_every_parameter_gets_a_gradient() -> None:
    model = small()
    torch.autograd.backward(model(torch.arange(12).unsqueeze(0)).square().sum())
    missing = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert missing == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [({"width": 18}, ("18", "4")), ({"depth": 0}, ("depth is", "0"))],
)
def test_impossible_shapes_are_refused(changes: dict[str, Any], told: tuple[str, ...]) -> None:
    with raises(TaskError, "out-of-range", *told):
        small(**changes)


def test_generation_repeats_with_its_seed_and_leaves_torchs_random_state() -> None:
    model, prompt = small(), torch.tensor([1, 2, 3])
    state = torch.get_rng_state()

    def draw(seed: int) -> list[int]:
        tokens = generate(model, prompt, length=30, context=12, temperature=0.8, seed=seed)
        return [int(token) for token in tokens]

    assert draw(0) == draw(0) != draw(1)
    assert draw(0)[:3] == [1, 2, 3]
    assert len(draw(0)) == 33
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
