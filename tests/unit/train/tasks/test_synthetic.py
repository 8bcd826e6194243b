"""synthetic:NAME: models by name, with random inputs, and what is said where a library lacks.

The libraries themselves are not needed here: small stand-ins take their places.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dearmpi.errors import TaskError
from dearmpi.train.data.data import load_batch
from dearmpi.train.tasks.synthetic import build_synthetic
from tests.codes import raises


class Pooled(nn.Module):
    """Any image classifier."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.layer(images.mean(dim=(2, 3)))
        return scores


class TinyBert(nn.Module):
    """What BertForPreTraining takes and gives."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.layer = nn.Embedding(config.vocab_size, 4)

    def forward(self, input_ids: Tensor, labels: Tensor, next_sentence_label: Tensor) -> Any:
        assert input_ids.shape == labels.shape
        assert next_sentence_label.shape == input_ids.shape[:1]
        return SimpleNamespace(loss=self.layer(input_ids).square().mean())


def replace(monkeypatch: pytest.MonkeyPatch, name: str, **members: object) -> None:
    module = ModuleType(name)
    module.__dict__.update(members)
    monkeypatch.setitem(sys.modules, name, module)


def remove(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)


@pytest.fixture
def torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    models = ModuleType("torchvision.models")
    models.__dict__["list_models"] = lambda module: ["resnet18", "resnet50"]
    models.__dict__["get_model"] = lambda name, weights, num_classes: Pooled(num_classes)
    replace(monkeypatch, "torchvision", models=models)
    monkeypatch.setitem(sys.modules, "torchvision.models", models)


@pytest.mark.parametrize(
    ("name", "library", "extra"),
    [
        ("bert-base", "transformers", "transformers"),
        ("resnet50", "transformers", "transformers"),
        ("transformers:vit", "transformers", "transformers"),
        ("torchvision:resnet50", "torchvision", "torchvision"),
        ("timm:resnet50", "timm", "timm"),
    ],
)
def test_a_library_that_lacks_is_named_with_its_extra(
    name: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove(monkeypatch, library)
    with pytest.raises(TaskError) as raised:
        build_synthetic(name, {})
    assert f"synthetic:{name}" in str(raised.value)
    assert f"needs {library}, which is not installed" in str(raised.value)
    assert f"pip install 'dearmpi[{extra}]'" in str(raised.value)


def test_a_library_that_cannot_be_imported_gives_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(name: str) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr("dearmpi.train.tasks.task.import_module", fail)
    with raises(TaskError, "library-broken"):
        build_synthetic("torchvision:resnet18", {})


def test_images_have_the_size_asked_for_and_stay_the_same(torchvision: None) -> None:
    options = {"image_size": "16", "samples": "100"}
    task = build_synthetic("torchvision:resnet18", options)
    again = build_synthetic("torchvision:resnet18", options)
    images, labels = load_batch(task, task.train_data, (0, 5, 99))
    assert images.shape == (3, 3, 16, 16)
    assert labels.shape == (3,)
    assert len(task.train_data) == 100
    assert torch.equal(images, load_batch(again, again.train_data, (0, 5, 99))[0])
    assert task.loss(task.model, (images, labels)).ndim == 0
    assert (task.unit, task.units_per_sample) == ("images", 1)


def test_resnet50_is_the_published_one_where_transformers_is_installed() -> None:
    pytest.importorskip("transformers")
    task = build_synthetic("resnet50", {"image_size": "32"})
    parameters = list(task.model.parameters())
    assert len(parameters) == 161
    assert sum(parameter.numel() for parameter in parameters) == 25_557_032
    torch.autograd.backward(task.loss(task.model, load_batch(task, task.train_data, (0, 1))))
    assert all(parameter.grad is not None for parameter in parameters)


def test_an_unknown_model_of_a_library_gets_the_nearest(torchvision: None) -> None:
    with raises(TaskError, "unknown-choice", "'resnet50'"):
        build_synthetic("torchvision:resnet5", {})


def test_bert_large_has_its_published_sizes_and_counts_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def config(**given: object) -> SimpleNamespace:
        return SimpleNamespace(vocab_size=100, **given)

    replace(monkeypatch, "transformers", BertConfig=config, BertForPreTraining=TinyBert)
    task = build_synthetic("bert-large", {"seq_len": "24"})
    assert isinstance(task.model, TinyBert)
    sizes = task.model.config
    assert (sizes.hidden_size, sizes.num_hidden_layers, sizes.num_attention_heads) == (1024, 24, 16)
    batch = load_batch(task, task.train_data, (0, 1, 2))
    assert batch[0].shape == (3, 24)
    assert task.loss(task.model, batch).ndim == 0
    assert (task.unit, task.units_per_sample) == ("tokens", 24)


@pytest.mark.parametrize(
    ("name", "options", "refused"),
    [
        ("bert-bas", {}, ("unknown-choice", "synthetic:bert-bas", "'bert-base'", "resnet50")),
        ("", {}, ("unknown-choice", "bert-base")),
        ("bert-base", {"image_size": "64"}, ("unknown-task-option", "'image_size'", "seq_len")),
        ("resnet50", {"seq_len": "64"}, ("unknown-task-option", "'seq_len'", "image_size")),
        ("resnet50", {"samples": "0"}, ("out-of-range", "samples is", "0")),
    ],
)
def test_bad_names_and_options_are_refused(
    name: str, options: dict[str, str], refused: tuple[str, ...]
) -> None:
    with raises(TaskError, *refused):
        build_synthetic(name, options)
