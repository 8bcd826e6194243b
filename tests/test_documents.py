"""What documents say that code does: it is run."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import click
import pytest

import dearmpi
from dearmpi.cli.commands import group
from docs import generate
from docs.pictures import draw_gain, draw_plan, draw_schedules, draw_timelines

ROOT = Path(__file__).resolve().parent.parent
MOST_WORDS = 22_000  # of all pages and README, without the pages that are generated
MOST_README_WORDS = 700
MOST_SENTENCE_WORDS = 25
MOST_TERMS = 25
MOST_FILES_OF_A_WALK = 15


def test_the_plan_that_planning_draws_is_what_its_lines_print(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (ROOT / "docs" / "explanation" / "planning.md").read_text()
    draw_plan.main()
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


@pytest.mark.parametrize(
    ("ratio", "gain"), [(1.0, 1.33), pytest.param(2.0, 1.17, marks=pytest.mark.slow)]
)
def test_the_chart_of_gains_shows_the_measured_table_and_the_simulation(
    ratio: float, gain: float
) -> None:
    drawn = (ROOT / "docs" / "pictures" / "gain.svg").read_text()
    measured = draw_gain.measured()
    assert len(measured) == 15 and all(f"<title>{gain:.2f}<" in drawn for _, gain in measured)
    text = (ROOT / "docs" / "explanation" / "when-it-pays.md").read_text()
    assert f"{gain:.2f} at {ratio:g}" in text
    assert draw_gain.simulated(ratio)[0] == pytest.approx(gain, abs=0.005)


def test_updates_are_drawn_where_they_happen() -> None:
    """In DeAR after ``step()``, as soon as a bucket is reduced; in DDP after all all-reduces."""
    placed = [(1, "RS1"), (3, "RS0"), (4, "AG0"), (5, "AG1")]
    assert draw_schedules.updates(placed, whole=False) == [(4, ["U1", "U0"])]
    placed = [(1, "RS1"), (4, "RS0"), (5, "AG0"), (6, "AG1")]
    assert draw_schedules.updates(placed, whole=False) == [(4, ["U1"]), (5, ["U0"])]
    assert draw_schedules.updates(placed, whole=True) == [(7, ["U1", "U0"])]
    drawn = (ROOT / "docs" / "pictures" / "schedules.svg").read_text()
    assert drawn.count("<title>update of bucket") == 12


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


def written_pages() -> list[Path]:
    """README, CONTRIBUTING and the pages under docs/ that people write."""
    under_docs = [path for path in pages() if ROOT / "docs" in path.parents]
    found = [path for path in under_docs if not path.read_text().startswith(generate.NOTE)]
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *found]


def commands_of(text: str) -> Iterator[list[str]]:
    """What follows ``dear-train`` in the commands of a page's blocks."""
    blocks = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
    for block in [block for language, block in blocks if language in ("", "sh", "bash")]:
        for line in re.sub(r"\\\n", " ", block).splitlines():
            for part in re.split(r"&&|\||;", re.sub(r"(^|\s)#.*", "", line)):
                before, _, after = part.partition("dear-train ")
                if (
                    after
                    and re.fullmatch(r"\s*(\$ )?([\w./=:,-]+ +)*", before)
                    and "[" not in after
                ):
                    yield shlex.split(after)


def parse(arguments: list[str]) -> None:
    """Read a command line as dear-train does, without carrying it out; raises what click raises."""
    command: click.Command = group
    context = group.make_context("dear-train", [arguments[0]])
    while isinstance(command, click.Group):
        command = command.commands[arguments[0]]
        arguments = arguments[1:]
    command.make_context(str(command.name), list(arguments), parent=context)
    if "--" in arguments and arguments[arguments.index("--") + 1].startswith("--"):  # a run's flags
        parse(["run", *arguments[arguments.index("--") + 1 :]])


@pytest.mark.parametrize("page", written_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_pages_have_their_flags(page: Path) -> None:
    text = page.read_text()
    for arguments in commands_of(text):
        parse(arguments)
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    quoted = re.findall(r"`([^`]*dear-train [^`]*)`", prose)
    for arguments in commands_of(
        "".join(f"```\n{' '.join(each.split())}\n```\n" for each in quoted)
    ):
        with suppress(click.MissingParameter, click.BadOptionUsage):  # a flag without its value
            parse(arguments)


def test_a_flag_that_does_not_exist_is_found() -> None:
    (arguments,) = commands_of("```\nmpirun -n 2 dear-train run --task digits --epoch 3\n```\n")
    with pytest.raises(click.NoSuchOption):
        parse(arguments)


def words(text: str) -> list[str]:
    """Words that hold a letter or a digit: rules and borders of tables do not count."""
    return [word for word in text.split() if re.search(r"\w", word)]


def sentences(text: str) -> list[str]:
    """Sentences of a page outside of code; each cell of a table is text by itself."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", text))
    blocks = [""]
    for line in map(str.strip, text.splitlines()):
        if line.startswith("|"):
            blocks += line.strip("|").split("|")
        elif not line or line.startswith("#"):
            blocks.append("")
        elif re.match(r"([-*]|\d+\.) ", line):
            blocks.append(line)
        else:
            blocks[-1] += f" {line}"
    return [part for block in blocks for part in re.split(r"(?<=[.!?:;])\s+", block)]


@pytest.mark.parametrize("page", written_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_pages_name_exist(page: Path) -> None:
    homes = [
        ROOT,
        ROOT / "dearmpi",
        ROOT / "tests",
        ROOT / "tests" / "unit",
        ROOT / "tests" / "mpi",
    ]
    for name in re.findall(r"`(\w[\w/-]*/[\w-]+\.(?:py|sbatch))`", page.read_text()):
        assert any((home / name).exists() for home in homes), f"{name} does not exist"


def test_the_architecture_has_few_terms_and_a_short_walk() -> None:
    text = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    terms = re.findall(r"^\| ", text[text.index("## Terms") : text.index("## Rooms")], re.MULTILINE)
    assert len(terms) <= 1 + MOST_TERMS
    walked = re.findall(r"^\d+\. `([\w/]+\.py)`", text, re.MULTILINE)
    assert 10 <= len(walked) == len(set(walked)) <= MOST_FILES_OF_A_WALK


def test_generated_pages_are_what_the_code_says() -> None:
    stale = [path.name for path, text in generate.pages().items() if path.read_text() != text]
    assert not stale, f"run python docs/generate.py: {stale}"


def test_pages_are_short() -> None:
    counts = {path: len(words(path.read_text())) for path in written_pages()}
    assert counts[ROOT / "README.md"] <= MOST_README_WORDS
    assert sum(counts.values()) <= MOST_WORDS, counts


@pytest.mark.parametrize("page", written_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_are_short(page: Path) -> None:
    long = [part for part in sentences(page.read_text()) if len(words(part)) > MOST_SENTENCE_WORDS]
    assert not long


def docstrings(path: Path) -> Iterator[str]:
    """Paragraphs of docstrings, without examples and drawings, which are indented."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
                if not re.search(r"\A\s|[\b├]", paragraph):  # click keeps the lines behind a \b
                    yield paragraph.replace("``", "`")


def test_sentences_of_docstrings_are_short() -> None:
    long = [
        f"{path.relative_to(ROOT)}: {part}"
        for path in sorted((ROOT / "dearmpi").rglob("*.py"))
        for paragraph in docstrings(path)
        for part in sentences(paragraph)
        if len(words(part)) > MOST_SENTENCE_WORDS
    ]
    assert not long, "\n".join(long)


def test_public_names_are_documented() -> None:
    for name in dearmpi.__all__:
        value = getattr(dearmpi, name)
        assert value.__doc__, name
        for member, method in vars(value).items() if isinstance(value, type) else ():
            if not member.startswith("_") and callable(method):
                assert method.__doc__, f"{name}.{member}"


def test_what_can_be_imported_is_listed() -> None:
    assert set(dearmpi.__all__) <= set(dir(dearmpi))
    assert sys.modules["dearmpi"] is dearmpi
