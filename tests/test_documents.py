"""What documents say that code does: it is run."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import dearmpi
from docs.pictures import draw_schedules, draw_timelines

ROOT = Path(__file__).resolve().parent.parent


def test_the_plan_that_planning_draws_is_what_its_lines_print(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (ROOT / "docs" / "explanation" / "planning.md").read_text()
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


def pages() -> list[Path]:
    """Every Markdown file of the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    names = listed.stdout.split() if listed.returncode == 0 else []
    found = [ROOT / name for name in names] or sorted(ROOT.glob("[!.]*/**/*.md"))
    return [path for path in found if path.is_file()]


@cache
def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub and MyST make them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE))


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{target} does not exist"
        if anchor:
            assert anchor in anchors(path), f"{target} names no heading"


def test_what_can_be_imported_is_listed() -> None:
    assert set(dearmpi.__all__) <= set(dir(dearmpi))
    assert sys.modules["dearmpi"] is dearmpi
