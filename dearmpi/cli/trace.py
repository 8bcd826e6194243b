"""dear-train trace: put the traces of all ranks together."""

from __future__ import annotations

from pathlib import Path

import click

from dearmpi.cli.console import Console
from dearmpi.cli.measurement import OUT, check_writable


@click.group()
def trace() -> None:
    """Work with traces, which dear-train run --trace START:STOP records."""


@trace.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=OUT,
    metavar="FILE",
    help="default: trace/merged.json in the run folder",
)
def merge(run: Path, out: Path | None) -> None:
    """Put the traces of all ranks of the run folder RUN into one file, their clocks aligned.

    Open it at https://ui.perfetto.dev or in chrome://tracing.
    """
    from dearmpi.report.draw.unit import count_text
    from dearmpi.report.read.trace_merge import merge as merge_traces

    check_writable(out)
    merged = merge_traces(run, out)
    Console(speaks=True).say(
        f"wrote {merged.path}: {merged.num_events} events of "
        f"{count_text(merged.num_ranks, 'rank')}, clocks aligned within "
        f"{merged.uncertainty_us / 1e3:.2f} ms",
        *(f"note: {note}" for note in merged.notes),
    )
