"""The report in a real browser: headless Chromium, from disk.

DEAR_TEST_PICTURES names a folder in which the pictures of the screen are kept.
"""

from __future__ import annotations

import html
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dearmpi.report.draw.shape import DARK, LIGHT
from dearmpi.report.page.report import write_report
from tests.unit.report.example_run import ExampleRun

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)

pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(BROWSERS)} is here")

# Shows the report in a frame of a phone's width, where Chromium's own windows are never as narrow,
# and says in the title what it found there.
PROBE = """<!doctype html><meta charset="utf-8"><title>none</title><body style="margin:0">
<iframe id="frame" src="report.html" width="{width}" height="{height}" style="border:0"></iframe>
<script>
frame.onload = () => {{
  const page = frame.contentDocument, view = page.defaultView;
  const pictures = [...page.querySelectorAll("figure svg")];
  const shown = pictures.filter(s => s.getBoundingClientRect().width);
  const texts = shown.flatMap(s => [...s.querySelectorAll("text")]);
  const sizes = texts.map(t => t.getBoundingClientRect().height);
  const cut = texts.filter(t => {{
    const a = t.getBoundingClientRect(), b = t.ownerSVGElement.getBoundingClientRect();
    return a.left < b.left - 1 || a.right > b.right + 1 || a.bottom > b.bottom + 1;
  }});
  document.title = JSON.stringify({{
    figures: page.querySelectorAll("figure").length, shown: shown.length,
    wider: page.documentElement.scrollWidth - view.innerWidth,
    smallest: Math.min(...sizes), cut: cut.map(t => t.textContent),
    paper: view.getComputedStyle(page.documentElement).backgroundColor,
  }});
}};
</script>"""


def browse(page: Path, picture: Path, *options: str, width: int, height: int) -> tuple[str, str]:
    """Show ``page``, take a picture, and return its document and what the console said."""
    assert BROWSER is not None
    common = [
        *(BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        *("--allow-file-access-from-files", "--enable-logging=stderr", "--log-level=0"),
        *(f"--user-data-dir={page.parent / 'browser'}", f"--window-size={width},{height}"),
        *("--virtual-time-budget=2000", *options, page.as_uri()),
    ]
    done = subprocess.run(
        [*common[:1], "--dump-dom", f"--screenshot={picture}", *common[1:]],
        capture_output=True,
        timeout=180,
    )
    lines = done.stderr.decode(errors="replace").splitlines()
    return done.stdout.decode(), "\n".join(line for line in lines if "CONSOLE" in line)


def colour(name: str) -> str:
    """A colour as browsers write it."""
    return f"rgb({', '.join(str(value) for value in bytes.fromhex(name[1:]))})"


@pytest.mark.parametrize(
    ("look", "width", "options", "paper"),
    [
        pytest.param("desktop", 1100, (), LIGHT["paper"], marks=pytest.mark.slow),
        pytest.param(
            "dark",
            1100,
            ("--blink-settings=preferredColorScheme=0",),
            DARK["paper"],
            marks=pytest.mark.slow,
        ),
        ("phone", 360, (), LIGHT["paper"]),
    ],
)
def test_pictures_are_seen_whole_and_legible(
    tmp_path: Path, look: str, width: int, options: tuple[str, ...], paper: str
) -> None:
    run = ExampleRun(num_ranks=3, num_buckets=13, backlog_s=0.2, slow={2: 0.1}, data_s=0.05)
    write_report(run.write(tmp_path), tmp_path)
    probe, height = tmp_path / "probe.html", 5200
    probe.write_text(PROBE.format(width=width, height=height))
    kept = Path(os.environ.get("DEAR_TEST_PICTURES", tmp_path))
    kept.mkdir(parents=True, exist_ok=True)
    picture = kept / f"report-{look}.png"
    dom, console = browse(probe, picture, *options, width=max(width, 500), height=height)
    assert not console, console
    found = json.loads(html.unescape(dom.partition("<title>")[2].partition("</title>")[0]))
    assert found["figures"] == found["shown"] == 10, found
    assert found["wider"] <= 0, "the page is wider than the screen"
    assert found["smallest"] >= 10 and not found["cut"], found
    assert found["paper"] == colour(paper)
    assert picture.stat().st_size > 20_000
