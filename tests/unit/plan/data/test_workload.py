"""Workloads: what the files say, and names that are none."""

from __future__ import annotations

import json
from importlib import resources

import pytest

from dearmpi.errors import ConfigError
from dearmpi.plan.data.workload import is_workload, read_workload, workload_names
from tests.codes import raises

# Layers, tensors and million parameters, as the paper's table of models gives them; the decoder of
# BERT, which has no parameters of its own, is a layer more.
PAPER = {
    "resnet50": (107, 161, 25.6, 64),
    "densenet201": (402, 604, 20.0, 32),
    "inception_v4": (299, 449, 42.7, 64),
    "bert_base": (105 + 1, 206, 110.1, 64),
    "bert_large": (201 + 1, 398, 336.2, 32),
}


def test_all_models_of_the_paper_are_there() -> None:
    assert set(workload_names()) == set(PAPER)


@pytest.mark.parametrize("name", PAPER)
def test_sizes_are_the_papers(name: str) -> None:
    workload = read_workload(name)
    layers, tensors, millions, batch_size = PAPER[name]
    assert len(workload.layers) == layers
    assert workload.num_tensors == tensors
    assert round(workload.num_parameters / 1e6, 1) == millions
    assert workload.batch_size == batch_size


@pytest.mark.parametrize("name", PAPER)
def test_totals_are_those_that_the_file_states(name: str) -> None:
    data = json.loads(resources.files("dearmpi").joinpath("workloads", f"{name}.json").read_text())
    workload = read_workload(name)
    assert workload.num_parameters == data["num_parameters"]
    assert workload.num_tensors == data["num_tensors"]
    assert sum(layer.flops for layer in workload.layers) == data["total_forward_flops_per_sample"]


def test_only_the_decoder_is_tied() -> None:
    tied = {
        (layer.name, layer.uses)
        for name in workload_names()
        for layer in read_workload(name).layers
        if layer.uses
    }
    assert tied == {("cls.predictions.decoder", ("bert.embeddings.word_embeddings.weight",))}


def test_equal_layers_share_megabytes_and_time() -> None:
    workload = read_workload("equal:100:8")
    assert [layer.params[0].shape for layer in workload.layers] == [(3_125_000,)] * 8
    assert workload.shares() == [0.125] * 8
    assert len(read_workload("equal:1").layers) == 24


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("equal", "malformed-value"),
        ("equal:x", "malformed-value"),
        ("equal:1:0", "out-of-range"),
        ("equal:1:2:3", "out-of-range"),
        ("equal:0", "out-of-range"),
        ("vgg", "unknown-choice"),
    ],
)
def test_a_workload_that_does_not_exist_is_refused(name: str, code: str) -> None:
    with raises(ConfigError, code, name):
        read_workload(name)


def test_the_nearest_name_is_suggested() -> None:
    with raises(ConfigError, "unknown-choice", "'resnet50'"):
        read_workload("resnet-50")
    assert not is_workload("resnet-50") and is_workload("equal:7")
