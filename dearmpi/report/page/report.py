"""Report: reads a run folder, and writes its page and pictures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dearmpi.errors import ConfigError
from dearmpi.report.analyse.figures import measure
from dearmpi.report.draw import png
from dearmpi.report.page.html import WIDE, Section, draw_page
from dearmpi.report.page.limit import Verdict, gains_of, judge, part_step
from dearmpi.report.page.sections import (
    course_sections,
    overlap_sections,
    replica_of,
    step_sections,
)
from dearmpi.report.read.run_files import read_run

_PICTURES = (
    *("step", "gains", "iteration", "ranks", "buckets", "layout"),
    *("step-time", "throughput", "loss", "learning-rate"),
)


@dataclass(frozen=True, slots=True)
class Report:
    """What was written. verdict: None for a run that has measured nothing.

    notes: what is missing, in sentences.
    """

    page: Path
    pictures: tuple[Path, ...]
    verdict: Verdict | None
    notes: tuple[str, ...]


def write_report(run_folder: Path, destination: Path) -> Report:
    """Write ``destination``/report.html, and its pictures as PNG to ``destination``/report/.

    Pictures of an earlier report that this one has not are removed. Without Pillow there are none,
    which a note says. Raises ConfigError where nothing can be written.
    """
    run = read_run(run_folder)
    figures = measure(
        run.history,
        run.recording,
        hosts=run.hosts,
        schedule=str(run.settings.get("schedule", "")),
        planned=run.plan is not None,
        num_cores=run.num_cores,
        num_threads=run.num_threads,
    )
    verdict, sections = None, list[Section]()
    if figures is not None:
        replica = replica_of(run, figures)
        gains = gains_of(figures, part_step(figures), replica)
        verdict = judge(figures, gains)
        sections = [*step_sections(figures, gains), *overlap_sections(run, figures, replica)]
    sections += course_sections(run)
    page = destination / "report.html"
    notes = run.notes
    try:
        destination.mkdir(parents=True, exist_ok=True)
        text = draw_page(run, figures, verdict, sections)
        page.write_text(text, encoding="utf-8", errors="replace")  # a folder's name may be no UTF-8
        try:
            pictures = _write_pictures(sections, destination / "report")
        except ConfigError as error:
            pictures, notes = (), (*notes, f"{error}.")
        _remove_others(destination / "report", pictures)
    except OSError as error:
        place = error.filename or destination  # a full disk names no file
        raise ConfigError(
            f"cannot write {place}: {error.strerror}; see --out", code="cannot-write"
        ) from error
    return Report(page, pictures, verdict, notes)


def _write_pictures(sections: list[Section], folder: Path) -> tuple[Path, ...]:
    drawn = [section.draw(WIDE) for section in sections]
    assert {picture.name for picture in drawn} <= set(_PICTURES), "one that would not be removed"
    files = [(folder / f"{picture.name}.png", png.draw(picture)) for picture in drawn]
    folder.mkdir(exist_ok=True)
    for path, content in files:
        path.write_bytes(content)
    return tuple(path for path, _ in files)


def _remove_others(folder: Path, kept: tuple[Path, ...]) -> None:
    """An earlier report's pictures beside a page that says something else would mislead."""
    for name in _PICTURES:
        path = folder / f"{name}.png"
        if path not in kept and path.is_file():
            path.unlink()
