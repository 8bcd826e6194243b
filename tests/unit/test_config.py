"""What is used where nothing is chosen, and messages about names that nobody knows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dearmpi.config import MIB, EngineConfig, known_names
from dearmpi.errors import ConfigError
from dearmpi.plan.data.plan import read_plan
from dearmpi.plan.data.plan_choice import choose_plan
from tests.codes import raises


@pytest.mark.parametrize(
    ("model_mb", "cap_mb"), [(0.5, 0.25), (1, 0.5), (4, 1), (16, 2), (32, 4), (1000, 4)]
)
@pytest.mark.parametrize("world_size", [1, 4])
def test_the_bucket_cap_is_an_eighth_of_the_model_within_limits(
    world_size: int, model_mb: float, cap_mb: float
) -> None:
    model_bytes = int(model_mb * MIB)
    assert EngineConfig().cap_bytes(model_bytes, world_size=world_size) == cap_mb * MIB
    given = EngineConfig(bucket_cap_mb=3.0)
    assert given.cap_bytes(model_bytes, world_size=world_size) == 3 * MIB


@pytest.mark.parametrize(
    ("world_size", "model_mb", "cap_mb"),
    [(64, 1000, 4), (128, 1000, 8), (512, 1000, 32), (4096, 1000, 256), (512, 20, 10)],
)
def test_of_many_ranks_each_has_a_shard_worth_a_message(
    world_size: int, model_mb: float, cap_mb: float
) -> None:
    """A ring's messages are shards: start-up would be most of what smaller ones take."""
    model_bytes = int(model_mb * MIB)
    assert EngineConfig().cap_bytes(model_bytes, world_size=world_size) == cap_mb * MIB


def test_numbers_of_numpy_become_plain_ones_for_files_and_texts() -> None:
    settings: dict[str, Any] = {
        "bucket_cap_mb": np.float64(1.5),
        "density": np.float32(0.25),
        "window": np.int64(3),
        "check_every": np.int8(2),
    }
    found = EngineConfig(compress="topk", **settings)
    plain = EngineConfig(compress="topk", bucket_cap_mb=1.5, density=0.25, window=3, check_every=2)
    assert found == plain and repr(found) == repr(plain)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"window": None}, "window is None"),
        ({"window": 2.0}, "give a whole number"),
        ({"window": True}, "window is True"),
        ({"bucket_cap_mb": "4"}, "give a number, or None"),
        ({"check_every": 0.5}, "give a whole number, or None"),
    ],
)
def test_what_is_no_number_is_refused(settings: dict[str, Any], words: str) -> None:
    with raises(ConfigError, "wrong-type", words):
        EngineConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"comm_dtype": torch.bfloat16}, "did you mean 'bf16'?"),
        ({"compress": 8}, "compress is 8, of type int"),
        ({"gather": None}, "gather is None, of type NoneType"),
        ({"scope": ["bucket"]}, "of type list"),
    ],
)
def test_a_choice_that_is_no_text_is_refused(settings: dict[str, Any], words: str) -> None:
    with raises(ConfigError, "wrong-type", words):
        EngineConfig(**settings)


def test_weights_of_ranks_that_have_no_sum_are_refused() -> None:
    with raises(ConfigError, "out-of-range", "finite sum"):
        EngineConfig(shards=[1e308, 1e308])


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"topology": "racks"}, "malformed-value"),
        ({"topology": "4"}, "malformed-value"),
        ({"topology": "2x0"}, "malformed-value"),
        ({"topology": "2x2@0,1,2"}, "malformed-value"),
        ({"topology": "2x2@0,1,2,2"}, "malformed-value"),
        ({"topology": "2x2/1"}, "malformed-value"),
        ({"topology": "2x2/1x1x1"}, "malformed-value"),
        ({"topology": "2x2/1x0"}, "malformed-value"),
        ({"topology": "2x2/1x-1"}, "malformed-value"),
        ({"topology": 4}, "wrong-type"),
        ({"topology": "hosts", "compress": "int8"}, "settings-contradict"),
        ({"topology": "2x2", "reduce_scatter": "exchange"}, "settings-contradict"),
    ],
)
def test_a_topology_that_cannot_be_is_refused(settings: dict[str, Any], code: str) -> None:
    with raises(ConfigError, code, "topology"):
        EngineConfig(**settings)
    assert EngineConfig(topology="auto").grid_sizes == ()
    assert EngineConfig(topology="2x3x4").grid_sizes == (2, 3, 4)
    numbered = EngineConfig(topology="2x2@0,2,1,3")
    assert (numbered.grid_sizes, numbered.grid_order) == ((2, 2), (0, 2, 1, 3))
    rated = EngineConfig(topology="2x2/10x2.5@0,2,1,3")
    assert (rated.grid_sizes, rated.grid_rates) == ((2, 2), (10.0, 2.5))
    assert rated.grid_order == (0, 2, 1, 3) and numbered.grid_rates == ()
    file = EngineConfig(topology="2x2.json")
    assert (file.grid_sizes, file.topology_file) == ((), "2x2.json")


def test_the_nearest_word_is_told_where_words_stand_beside_files_and_numbers() -> None:
    with raises(ConfigError, "malformed-value", "did you mean 'hosts'?"):
        EngineConfig(topology="host")
    with raises(ConfigError, "unreadable-file", "did you mean 'bayes'?"):
        read_plan("byes")
    with raises(ConfigError, "file-missing", "did you mean 'auto'?"):
        choose_plan("atuo", EngineConfig())


def test_an_unknown_name_far_from_all_gets_the_list_alone() -> None:
    assert known_names("zzz", ["alpha", "beta"]) == "; known: alpha, beta"
    assert known_names("zzz", []) == "; it has none"


def test_the_nearest_name_is_found_in_whatever_case() -> None:
    assert known_names("adm", ["Adam", "SGD"]) == "; did you mean 'Adam'? known: Adam, SGD"


def test_a_long_list_of_names_is_cut_but_the_nearest_is_looked_for_in_all_of_it() -> None:
    known = [f"name{number}" for number in range(50)]
    assert known_names("nam49", known, most=2) == (
        "; did you mean 'name49'? known: name0, name1, ... (50 in all)"
    )
