"""Quantizers: bounds of their errors, and what must be exact."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dearmpi.config import Compress
from dearmpi.engine.codec import quantized
from dearmpi.engine.codec.quantized import Quantizer, quantizer_of

FORMATS: list[Compress] = ["int8", "int4"]


def sent(quantizer: Quantizer, values: Tensor, *, chance: int | None = None) -> Tensor:
    """What ``values`` become on the way."""
    message = torch.full((quantizer.num_bytes(len(values)),), 0xFF, dtype=torch.uint8)
    quantizer.encode(values, message, chance=chance)
    decoded = torch.full_like(values, torch.nan)
    for _ in quantizer.decode(message, decoded, adds=False):
        pass
    return decoded


def largest_of_blocks(values: Tensor, block: int) -> Tensor:
    """For each element the largest magnitude of its block."""
    return torch.cat([part.abs().max().expand_as(part) for part in values.split(block)])


@pytest.mark.parametrize("compress", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(
    numel=st.integers(1, 700),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 1000),
    chance=st.none() | st.integers(0, 1 << 32),
)
def test_an_element_is_off_by_half_a_step_or_by_one_if_rounded_by_chance(
    compress: Compress, dtype: torch.dtype, numel: int, exponent: int, seed: int, chance: int | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized, "_PIECE", 256)
        patch.setattr(quantized, "_GROUP", 512)
        quantizer = quantizer_of(compress)
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(numel, generator=generator, dtype=dtype) * 2.0**exponent
        decoded = sent(quantizer, values, chance=chance)
    step = largest_of_blocks(values, quantizer.block) / quantizer.most * (1 + 2**-7)
    assert bool(((decoded - values).abs() <= step * (0.5 if chance is None else 1.0) + 1e-37).all())


@pytest.mark.parametrize("compress", FORMATS)
def test_whole_numbers_up_to_the_largest_code_are_exact(compress: Compress) -> None:
    quantizer = quantizer_of(compress)
    values = torch.arange(20 * quantizer.block) % (2 * quantizer.most + 1) - quantizer.most
    values[:: quantizer.block] = -quantizer.most
    assert torch.equal(sent(quantizer, values.float()), values.float())
    assert torch.equal(sent(quantizer, values.double(), chance=5), values.double())


@pytest.mark.parametrize("compress", FORMATS)
def test_numbers_rounded_by_chance_have_the_right_mean(compress: Compress) -> None:
    quantizer = quantizer_of(compress)
    values = torch.full((100_000,), 0.3)
    values[:: quantizer.block] = quantizer.most  # so that the step is one
    small = sent(quantizer, values, chance=5)[values < 1]
    assert set(small.unique().tolist()) == {0.0, 1.0}
    assert small.mean().item() == pytest.approx(0.3, abs=0.01)
    assert sent(quantizer, values)[values < 1].mean().item() == 0.0


@pytest.mark.parametrize("compress", FORMATS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("chance", [None, 3])
def test_a_block_that_is_not_finite_arrives_as_nan_and_its_neighbours_whole(
    compress: Compress, bad: float, chance: int | None
) -> None:
    quantizer = quantizer_of(compress)
    values = torch.full((3 * quantizer.block,), float(quantizer.most))
    values[quantizer.block + 5] = bad
    before, at, behind = sent(quantizer, values, chance=chance).split(quantizer.block)
    assert torch.equal(before, behind) and bool((before == quantizer.most).all())
    assert bool(at.isnan().all())


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, -0x400000])
def test_every_nan_is_one(bits: int) -> None:
    values = torch.full((256,), bits, dtype=torch.int32).view(torch.float32)
    assert bool(sent(quantizer_of("int8"), values).isnan().all())


@pytest.mark.parametrize("compress", FORMATS)
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-39, 3e38])
def test_the_ends_of_the_range_stay_finite(compress: Compress, value: float) -> None:
    decoded = sent(quantizer_of(compress), torch.full((256,), value))
    # A step of less than the smallest normal number counts as zero.
    assert decoded.tolist() == pytest.approx([value] * 256, rel=0.08, abs=1.2e-37)


def test_chance_leads_to_other_roundings_of_the_same_numbers() -> None:
    values = torch.full((6400,), 0.3)
    values[::64] = 7.0
    first, second, again = (sent(quantizer_of("int4"), values, chance=n) for n in (1, 2, 1))
    assert torch.equal(first, again)
    assert 0.3 < (first != second).float().mean() < 0.55, "2 * 0.3 * 0.7 of them, by chance"


def test_a_message_takes_little_more_than_a_byte_or_half_of_one_for_each_element() -> None:
    assert quantizer_of("int8").num_bytes(1 << 20) == (1 << 20) * (1 + 2 / 256)
    assert quantizer_of("int4").num_bytes(1 << 20) == (1 << 20) * (1 / 2 + 2 / 64)


def test_nothing_is_a_message_as_well() -> None:
    assert sent(quantizer_of("int4"), torch.zeros(0)).tolist() == []


@pytest.mark.parametrize("compress", FORMATS)
@pytest.mark.parametrize("numel", [5 * 64, (1 << 18) + 4096, (1 << 18) + 77])
def test_a_sum_has_the_bits_of_a_product_and_a_sum_rounded_apart(
    compress: Compress, numel: int
) -> None:
    quantizer = quantizer_of(compress)
    values, into = torch.randn(2, numel, generator=torch.Generator().manual_seed(0))
    message = torch.zeros(quantizer.num_bytes(numel), dtype=torch.uint8)
    quantizer.encode(values, message)
    decoded, total = torch.empty(numel), into.clone()
    for _ in quantizer.decode(message, decoded, adds=False):
        pass
    for _ in quantizer.decode(message, total, adds=True):
        pass
    assert torch.equal(total, into + decoded)
