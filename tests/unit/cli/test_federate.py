"""dear-train federate: its table, its files, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dearmpi.cli.main import main
from dearmpi.comm import lifecycle

SMALL = ["federate", "--clients", "6", "--condition", "10", "--target", "1e-4"]


@pytest.fixture(autouse=True)
def _not_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests have connected this process in another way."""
    monkeypatch.setattr(lifecycle._Process, "world", None)
    monkeypatch.setattr(lifecycle._Process, "progress", "thread")


def test_a_table_json_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn.datasets")
    found, picture = tmp_path / "found.json", tmp_path / "sent.svg"
    arguments = ["--cohort", "3", "--max-rounds", "200", "--down-weight", "0.1"]
    files = ["--json", str(found), "--picture", str(picture)]
    assert main([*SMALL, *arguments, *files]) == 0
    text = capsys.readouterr().out
    told = json.loads(found.read_text())
    names = [one["algorithm"] for one in told["algorithms"]]
    assert names == ["gd", "fedavg", "scaffnew", "compressed-scaffnew", "tamuna"]
    for one in told["algorithms"]:
        last = one["rounds"][-1]
        assert (
            one["arrived"] == (last["squared_distance"] <= 1e-4) == (one["algorithm"] != "fedavg")
        )
        assert one["cost"] == pytest.approx(last["sent"] + 0.1 * last["received"])
        assert f"\n{one['algorithm']} " in text
        assert one["algorithm"].removesuffix("-scaffnew") in picture.read_text()
    assert "fedavg" in text and "stopped" in text


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--algorithms", "adam"], "unknown-choice"),
        (["--algorithms", ""], "unknown-choice"),
        (["--algorithms", "gd,gd"], "given-twice"),
        (["--cohort", "7"], "out-of-range"),
        (["--cohort", "-1"], "out-of-range"),
        (["--sparsity", "0"], "out-of-range"),
        (["--p", "0"], "out-of-range"),
        (["--target", "0"], "out-of-range"),
        (["--clients", "0"], "out-of-range"),
        (["--picture", "sent.txt"], "malformed-value"),
    ],
    ids=str,
)
def test_what_has_no_meaning_is_refused(
    arguments: list[str], code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn.datasets")
    assert main([*SMALL, *arguments]) != 0
    assert f"[{code}]" in capsys.readouterr().err
