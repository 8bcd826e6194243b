"""dear-train report: a page with pictures of a run."""

from __future__ import annotations

from pathlib import Path

import click

from dearmpi.cli.console import Console


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="where to write report.html and report/; default: the run folder",
)
def report(run: Path, out: Path | None) -> None:
    """Say what limits the run in the folder RUN, and write a page with its pictures.

    The page RUN/report.html needs nothing else to be shown; the pictures stand in RUN/report/ as
    PNG as well. A run that was started with --trace START:STOP shows an iteration in full.
    """
    from dearmpi.report.page.limit import UNMEASURED
    from dearmpi.report.page.report import write_report
    from dearmpi.train.run.run_folder import RunFolder

    folder = RunFolder.open(run)
    written = write_report(folder.path, out or folder.path)
    console = Console(speaks=True)
    console.say(UNMEASURED if written.verdict is None else written.verdict.sentence)
    console.say_all(f"note: {note}" for note in written.notes)
    console.say(f"wrote {written.page}")
    if written.pictures:
        console.say(f"wrote {len(written.pictures)} pictures in {written.pictures[0].parent}")
