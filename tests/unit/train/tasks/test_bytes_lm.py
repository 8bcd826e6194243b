"""bytes-lm: its samples, its loss, and that it learns."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from dearmpi.errors import DataError, TaskError
from dearmpi.train.data.data import Batches, load_batch
from dearmpi.train.tasks.bytes_lm import Windows, build_bytes_lm, next_byte_loss, printable
from dearmpi.train.tasks.task import Task
from tests.codes import raises

TINY = {"context": "16", "width": "32", "depth": "1", "heads": "2", "max_bytes": "200000"}


@pytest.fixture
def rhyme(tmp_path: Path) -> Path:
    """A text that one byte of context does not foretell, but a few do."""
    path = tmp_path / "rhyme.txt"
    path.write_text("row, row, row your boat, gently down the stream; merrily, merrily, " * 200)
    return path


def train(task: Task, *, steps: int, lr: float) -> None:
    batches = Batches(len(task.train_data), 16, 1, 0)
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=lr)
    for step in range(steps):
        (share,) = batches.step(*divmod(step, batches.steps_per_epoch))
        optimizer.zero_grad()
        loss = task.loss(task.model, load_batch(task, task.train_data, share.indices))
        torch.autograd.backward(loss)
        optimizer.step()


def evaluate(task: Task) -> float:
    """Mean loss on the held-out text, as shown to people."""
    assert task.eval_data is not None
    batch = load_batch(task, task.eval_data, tuple(range(len(task.eval_data))))
    with torch.no_grad():
        return task.loss(task.model, batch).item() * task.loss_scale


def entropy_to_beat(task: Task) -> float:
    (line,) = (note for note in task.notes if note.startswith("to beat: "))
    return float(line.split()[2])


def test_windows_predict_every_byte_but_the_first_once() -> None:
    text = torch.arange(101, dtype=torch.uint8)
    windows = Windows(text, context=10)
    predicted = torch.cat([windows[i][1:] for i in range(len(windows))])
    assert predicted.tolist() == list(range(1, 101))
    assert all(len(windows[i]) == 11 for i in range(len(windows)))
    with pytest.raises(IndexError):
        windows[len(windows)]


def test_a_new_model_needs_about_eight_bits_per_byte() -> None:
    torch.manual_seed(0)
    task = build_bytes_lm(TINY)
    assert task.loss_scale_name == "bits per byte"
    assert evaluate(task) == pytest.approx(8, abs=0.7)


def test_the_default_text_is_the_standard_library() -> None:
    task = build_bytes_lm({**TINY, "max_bytes": "2000000"})
    text, to_beat = task.notes
    assert "standard library" in text
    assert "digest" in text
    assert 2.5 < entropy_to_beat(task) < 4.5
    assert "bigram" in to_beat
    assert len(task.train_data) * 16 == pytest.approx(2_000_000 * 0.95, rel=0.02)


def test_text_that_is_left_out_is_told(rhyme: Path) -> None:
    size = rhyme.stat().st_size
    whole = build_bytes_lm({**TINY, "data": str(rhyme), "max_bytes": str(size)})
    assert not any(note.startswith("left out") for note in whole.notes)
    cut = build_bytes_lm({**TINY, "data": str(rhyme), "max_bytes": str(size - 1)})
    assert any(f"left out: what is above {size - 1:,} bytes" in note for note in cut.notes)


def test_a_short_training_beats_the_bigram_entropy_of_the_text(rhyme: Path) -> None:
    torch.manual_seed(0)
    task = build_bytes_lm({**TINY, "data": str(rhyme)})
    train(task, steps=150, lr=1e-2)
    assert evaluate(task) < 0.8 * entropy_to_beat(task)


def test_the_loss_is_the_mean_over_bytes_and_independent_of_the_batchs_cut(rhyme: Path) -> None:
    task = build_bytes_lm({**TINY, "data": str(rhyme)})
    model = task.model.double()
    batch = load_batch(task, task.train_data, tuple(range(6)))
    whole = next_byte_loss(model, batch)
    parts = 4 / 6 * next_byte_loss(model, batch[:4]) + 2 / 6 * next_byte_loss(model, batch[4:])
    torch.testing.assert_close(whole, parts, rtol=1e-12, atol=0)


def test_the_loss_is_taken_in_fp32_under_autocast(rhyme: Path) -> None:
    task = build_bytes_lm({**TINY, "data": str(rhyme)})
    batch = load_batch(task, task.train_data, tuple(range(4)))
    plain = task.loss(task.model, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = task.loss(task.model, batch)
    assert cast.dtype == torch.float32
    torch.testing.assert_close(cast, plain, rtol=0.02, atol=0)
    torch.autograd.backward(cast)


def test_the_same_seed_builds_the_same_model() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(build_bytes_lm(TINY).model.state_dict())
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_the_summary_is_a_sample_that_begins_with_the_prompt(rhyme: Path) -> None:
    options = {**TINY, "data": str(rhyme), "prompt": "merri", "sample_bytes": "40"}
    task = build_bytes_lm(options)
    assert task.summarize is not None
    lines = task.summarize(task.model)
    assert lines == task.summarize(task.model)
    assert "\n".join(lines).startswith("sample:\nmerri")
    assert len("\n".join(lines)) > len("sample:\nmerri")


def test_a_sample_cannot_command_the_terminal() -> None:
    assert (
        printable(b"a\tb\n\x1b[2J\x00\xff\r" + "é".encode()) == "a\tb\n\ufffd[2J\ufffd\ufffd\ufffdé"
    )


def test_defaults_are_for_steps_of_a_few_thousand_tokens() -> None:
    task = build_bytes_lm(TINY)
    assert task.unit == "tokens"
    assert task.units_per_sample == 16
    assert math.isclose(task.loss_scale, 1 / math.log(2))
    assert task.defaults["optimizer"] == "AdamW"


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"contxt": "5"}, ("unknown-task-option", "'context'")),
        ({"context": "0"}, ("out-of-range", "context is", "0")),
        ({"heads": "3"}, ("out-of-range", "6")),
        ({"prompt": ""}, ("out-of-range",)),
    ],
)
def test_bad_options_are_refused(options: dict[str, str], refused: tuple[str, ...]) -> None:
    with raises(TaskError, *refused):
        build_bytes_lm({**TINY, **options})


@pytest.mark.parametrize("data", ["{0}:", ":{0}", "{0}::{0}"])
def test_a_path_that_is_empty_is_not_the_current_folder(rhyme: Path, data: str) -> None:
    with raises(DataError, "malformed-value"):
        build_bytes_lm({**TINY, "data": data.format(rhyme)})


def test_a_text_shorter_than_the_context_needs_is_refused_with_sizes(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("too short")
    with raises(DataError, "data-insufficient", 9, 1, path, 20 * 17):
        build_bytes_lm({**TINY, "data": str(path)})


def test_a_context_longer_than_what_is_held_out_is_refused_with_sizes(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"abcd" * (20 * 8193 // 4))
    long = {**TINY, "data": str(path), "context": "8192"}
    with raises(DataError, "data-insufficient", 8192, 163860, 8193):
        build_bytes_lm(long)
    path.write_bytes(b"abcd" * (60 * 4096 // 4))
    with raises(DataError, "data-insufficient", 4096):
        build_bytes_lm({**long, "max_bytes": "300000", "eval_bytes": "5000"})
    task = build_bytes_lm({**long, "max_bytes": "300000"})
    assert task.eval_data is not None and len(task.eval_data) == 1
