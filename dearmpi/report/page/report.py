"""Report: reads a run folder, and writes its pictures and its page, one HTML file that needs no
other.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from dearmpi.errors import ConfigError
from dearmpi.report.analyse.figures import Figures, measure
from dearmpi.report.draw import png, svg
from dearmpi.report.draw.shape import Section
from dearmpi.report.draw.units import digits, share_text, time_text
from dearmpi.report.page.limit import SEEN, UNMEASURED, Verdict, gains_of, judge, part_step
from dearmpi.report.page.sections import (
    course_sections,
    overlap_sections,
    replica_of,
    step_sections,
)
from dearmpi.report.read.recording import total
from dearmpi.report.read.run_files import RunRecord, read_run
from dearmpi.span import Track

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


WIDE, NARROW = 920.0, 340.0

_STYLE = """
html{background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif;
-webkit-text-size-adjust:100%}
body{max-width:920px;margin:0 auto;padding:16px 10px 48px}
h1{font-size:1.5rem;line-height:1.25;overflow-wrap:anywhere;margin:.3em 0}
h2{font-size:1.15rem;margin:2.2em 0 .6em}
.verdict{font-size:1.15rem;border-left:5px solid var(--first);padding:.1em 0 .1em .7em;margin:1em 0}
.verdict.lost{border-color:var(--lost)}
.facts{display:flex;flex-wrap:wrap;gap:10px 28px;margin:1.2em 0;padding:0}
.facts div{min-width:4.5em}
dt{color:var(--faint);font-size:.85rem}
dd{margin:0;font-size:1.1rem;overflow-wrap:anywhere}
.hidden{position:absolute}
figure{margin:0}
figure svg{display:block;width:100%;height:auto}
.narrow{display:none}
figcaption,.notes{color:var(--faint);font-size:.92rem;margin-top:.5em}
details{margin-top:.5em;font-size:.9rem}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:2px 14px 2px 0;white-space:nowrap}
th{color:var(--faint);font-weight:normal}
code{font-size:.85rem;overflow-wrap:anywhere}
.flag{white-space:nowrap}
.value{white-space:nowrap}
.terms dt{color:var(--ink);font-weight:600;margin-top:.5em}
.terms dd{font-size:.92rem;color:var(--faint)}
@media (max-width:640px){.wide{display:none}.narrow{display:block}}
"""


def draw_page(
    run: RunRecord,
    figures: Figures | None,
    verdict: Verdict | None,
    sections: Sequence[Section],
) -> str:
    """The page. Without figures it says what is missing."""
    title = f"{escape(run.name)}: run report"
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        '<link rel="icon" href="data:,">',
        f"<title>{title}</title>\n<style>\n{svg.style()}{_STYLE}</style>\n</head>\n<body>",
        svg.definitions(),
        f"<h1>{escape(run.name)}</h1>",
        _draw_verdict(verdict),
        _draw_facts(_facts(run, figures)),
        *map(_draw_section, sections),
        _draw_notes(run.notes),
        _draw_terms() if sections else "",
        _draw_origin(run),
        "</body>\n</html>\n",
    ]
    return "\n".join(parts)


def _prose(text: str) -> str:
    """``text`` for a page, whose flags and values with units stay on one line."""
    flags = re.sub(r"(?<![\w-])--[a-z][\w-]*", r'<span class="flag">\g<0></span>', escape(text))
    return re.sub(r"\d[\d.,]* (%|s|ms|us)(?!\w)", r'<span class="value">\g<0></span>', flags)


def _draw_verdict(verdict: Verdict | None) -> str:
    if verdict is None:
        return f'<p class="verdict lost">{UNMEASURED}</p>'
    kind = "verdict lost" if verdict.lost_s > 0 else "verdict"
    return f'<p class="{kind}">{_prose(verdict.sentence)}</p>'


def _facts(run: RunRecord, figures: Figures | None) -> list[tuple[str, str]]:
    facts = []
    if "task" in run.settings:
        facts.append(("task", str(run.settings["task"])))
    if run.num_ranks is not None:
        facts.append(("ranks", str(run.num_ranks)))
    if run.hosts:
        facts.append(("hosts", str(len(set(run.hosts)))))
    if run.history.rows:
        facts.append(("steps", f"{run.history.rows[-1].step:,}"))
    if figures is not None:
        facts.append(("step time", time_text(figures.step_s)))
        if figures.between_s > SEEN * figures.step_s:
            facts.append(("between steps", time_text(figures.between_s)))
    rate = run.history.typical(lambda row: row.samples_per_s)
    if rate is not None:
        units = run.units
        facts.append(("throughput", f"{digits(rate * units.per_sample)} {units.rate}/s"))
    if figures is not None and figures.hidden_share is not None:
        hidden = f"{share_text(figures.hidden_share)} hidden"
        facts.append(("communication", f"{time_text(figures.communication_s)} per step, {hidden}"))
    if run.settings.get("compress", "none") != "none":
        facts += _compression_facts(run)
    return facts


def _compression_facts(run: RunRecord) -> list[tuple[str, str]]:
    """What a rank sends in a step, what it still owes, and what encoding and decoding take."""
    facts = []
    sent_mb = run.history.typical(lambda row: row.sent_mb)
    owed = run.history.typical(lambda row: row.owed_share)
    if sent_mb is not None:
        rest = "" if owed is None else f", owes {share_text(owed)}"
        facts.append(("sent", f"{digits(sent_mb)} MB per step{rest}"))
    fallbacks = [number for _, number in run.history.column(lambda row: row.fallbacks)]
    if fallbacks and fallbacks[-1]:
        facts.append(("not compressed", f"{fallbacks[-1]:,.0f} buckets, which travelled whole"))
    window = run.recording.typical()
    if window is not None:
        spans = run.recording.spans[min(run.recording.spans)]
        parts = [window.clip(span) for span in spans if span.track is Track.CODEC]
        coded_s = total(part for part in parts if part is not None)
        facts.append(("codecs", f"{time_text(coded_s)} per step"))
    return facts


def _draw_facts(facts: Sequence[tuple[str, str]]) -> str:
    items = (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    return f'<dl class="facts">{"".join(items)}</dl>'


def _draw_section(section: Section) -> str:
    drawings = "".join(
        f'<div class="{kind}">{svg.element(section.draw(width))}</div>'
        for kind, width in (("wide", WIDE), ("narrow", NARROW))
    )
    return (
        f"<h2>{escape(section.heading)}</h2>\n<figure>{drawings}"
        f"<figcaption>{_prose(section.caption)}</figcaption></figure>{_draw_table(section.table)}"
    )


def _draw_table(table: Sequence[Sequence[str]]) -> str:
    if not table:
        return ""
    head, *rows = (
        "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)
        for tag, row in zip(["th"] + ["td"] * len(table), table, strict=False)
    )
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f'<details><summary>Numbers</summary><div class="scroll"><table>\n<tr>{head}</tr>\n{body}\n'
        "</table></div></details>"
    )


def _draw_notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    items = "".join(f"<li>{_prose(note)}</li>" for note in notes)
    return f'<h2>What is missing</h2>\n<ul class="notes">{items}</ul>'


_TERMS = (
    ("step", "a forward, a backprop and the update by the optimizer; between steps, a run saves, "
     "evaluates and logs"),
    ("bucket", "parameters whose gradients travel together, numbered from the first layers on"),
    ("reduce-scatter, all-gather", "the two exchanges of a bucket: each rank receives its part of "
     "the summed gradients; each rank receives the updated parameters of all"),
    ("hidden, exposed", "communication behind which the rank computes; communication for which its "
     "main thread waits"),
    ("in flight", "from the start of an exchange to its end"),
    ("waits for late ranks", "the rank waits while another one still computes or loads data"),
    ("simulated", "the same buckets and computation, without disturbances and late ranks"),
    ("hidden share", "one minus waits over the time in flight, on rank 0"),
)  # fmt: skip


def _draw_terms() -> str:
    items = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in _TERMS)
    return f'<h2>Terms</h2>\n<dl class="terms">{items}</dl>'


def _draw_origin(run: RunRecord) -> str:
    """How the run was started, so that it can be started again."""
    command = run.environment.get("command")
    if not isinstance(command, list):
        return ""
    program, *arguments = map(str, command or ["?"])
    words = shlex.join([program.rpartition("/")[2], *arguments])
    started = escape(str(run.environment.get("started", "")))
    return f"<h2>Started</h2>\n<p>{started}</p>\n<p><code>{_prose(words)}</code></p>"
