"""What documents say that code does: it is run."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import dearmpi
from docs.pictures import draw_schedules, draw_timelines

ROOT = Path(__file__).resolve().parent.parent


def test_the_plan_that_planning_draws_is_what_its_lines_print(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (ROOT / "docs" / "planning.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(code, "planning.md", "exec"), {})
    picture = capsys.readouterr().out.rstrip()
    assert picture.startswith("compute ") and picture in text


def test_pictures_are_what_their_scripts_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ROOT / "docs" / "pictures"
    monkeypatch.setattr(draw_timelines, "FOLDER", tmp_path)
    draw_timelines.main()
    drawn = list(tmp_path.iterdir())
    assert len(drawn) == 2
    for path in drawn:
        assert path.read_text() == (folder / path.name).read_text()
    capsys.readouterr()
    draw_schedules.main()
    assert capsys.readouterr().out == (folder / "schedules.svg").read_text()


def test_what_can_be_imported_is_listed() -> None:
    assert set(dearmpi.__all__) <= set(dir(dearmpi))
    assert sys.modules["dearmpi"] is dearmpi
