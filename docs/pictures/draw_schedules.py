"""Draws docs/pictures/schedules.svg from the schedules that the engine runs.

Usage: python docs/pictures/draw_schedules.py > docs/pictures/schedules.svg
"""

from __future__ import annotations

import re
from typing import get_args

from dearmpi.config import ScheduleName
from dearmpi.plan.data.schedule import build_schedule

BUCKETS = 4
CELL, LANE, LEFT, TOP = 46, 26, 118, 34
UPDATE = 10  # the width of an update, which takes next to no time
HUES = (212, 152, 32, 338)
TITLES = {
    "serial": "serial: all-reduce after backprop",
    "wfbp": "wfbp (DDP, Horovod): all-reduce during backprop",
    "dear": "dear: reduce-scatter during backprop, all-gather during the next feed-forward",
}


def place(row: str, width: int) -> list[tuple[int, str]]:
    """Column and label of every operation of a rendered lane."""
    cells = row[len("compute  ") :].replace("| ", "")
    return [(m.start() // width, m.group()) for m in re.finditer(r"[A-Z]+\d+", cells)]


def box(column: int, top: int, label: str) -> str:
    """One operation; buckets are coloured alike in all lanes."""
    hue, light = HUES[int(label[-1])], 78 if label[0] in "BF" else 62
    x = LEFT + column * CELL
    return (
        f'<rect x="{x}" y="{top}" width="{CELL - 3}" height="{LANE - 4}" rx="3" '
        f'fill="hsl({hue} 62% {light}%)"/><text x="{x + (CELL - 3) / 2}" y="{top + 15}" '
        f'class="op">{label}</text>'
    )


def updates(placed: list[tuple[int, str]], *, whole: bool) -> list[tuple[int, list[str]]]:
    """The column at whose left edge buckets are updated, in order.

    whole: when the last all-reduce is over, as DDP does. Else each between its reduce-scatter and
    its all-gather, after backprop: ``step()`` gives the options of the update.
    """
    ends = {label: column + 1 for column, label in placed}
    order = sorted((label for label in ends if label.startswith("RS")), key=lambda one: ends[one])
    last = max(end for label, end in ends.items() if label.startswith(("RS", "AG")))
    found: dict[int, list[str]] = {}
    for label in order:
        column = last if whole else max(BUCKETS, ends[label])
        found.setdefault(column, []).append(f"U{label[2:]}")
    return sorted(found.items())


def update_boxes(column: int, top: int, labels: list[str]) -> str:
    """Narrow boxes around the edge of ``column``, or right of the end of backprop."""
    x = LEFT + column * CELL - 1.5
    x += 3 if column == BUCKETS else -len(labels) * (UPDATE + 1) / 2
    return "".join(
        f'<rect x="{x + place * (UPDATE + 1):g}" y="{top}" width="{UPDATE}" height="{LANE - 4}" '
        f'rx="2" fill="hsl({HUES[int(label[-1])]} 62% 45%)"><title>update of bucket {label[-1]}'
        "</title></rect>"
        for place, label in enumerate(labels)
    )


def main() -> None:
    parts, height, columns = [], 8, 0
    for name in get_args(ScheduleName):
        rendered = build_schedule(name, BUCKETS).render().split("\n")
        width = len(f"RS{BUCKETS - 1} ")
        parts.append(f'<text x="8" y="{height + 14}" class="title">{TITLES[name]}</text>')
        ends: list[int] = []
        placed: list[tuple[int, str]] = []
        for index, row in enumerate(rendered):
            top = height + TOP - 10 + index * LANE
            parts.append(f'<text x="16" y="{top + 15}" class="lane">{row.split()[0]}</text>')
            for column, label in place(row, width):
                parts.append(box(column, top, label))
                ends.append(column + 1)
                placed.append((column, label))
        top = height + TOP - 10 + 2 * LANE
        parts.append(f'<text x="16" y="{top + 15}" class="lane">update</text>')
        for column, labels in updates(placed, whole=name != "dear"):
            parts.append(update_boxes(column, top, labels))
        bar = LEFT + BUCKETS * CELL - 1.5
        top = height + TOP - 14
        parts.append(
            f'<line x1="{bar}" y1="{top}" x2="{bar}" y2="{top + 3 * LANE + 4}" class="step"/>'
        )
        end = LEFT + max(ends) * CELL + 4
        parts.append(f'<text x="{end}" y="{height + TOP + 19}" class="lane">{max(ends)}</text>')
        columns = max(columns, *ends)
        height += TOP + 3 * LANE + 8
    total = LEFT + columns * CELL + 40
    print(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {height}" '
        f'width="{total}" height="{height}" role="img" aria-label="Three schedules of four '
        'buckets"><style>text{font-family:sans-serif;fill:#223}.title{font-size:13px;'
        "font-weight:600}.lane{font-size:12px;fill:#556}.op{font-size:11px;text-anchor:middle;"
        "fill:#112}.step{stroke:#334;stroke-width:1.5;stroke-dasharray:4 3}</style>"
        f'<rect width="{total}" height="{height}" fill="#fff" rx="6"/>'
        + "\n".join(parts)
        + "</svg>"
    )


if __name__ == "__main__":
    main()
