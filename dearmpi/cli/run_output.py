"""Commands on what runs have written: runs, compare, report, trace merge, checkpoint."""

from __future__ import annotations

from pathlib import Path

import click

from dearmpi.cli.console import Console
from dearmpi.cli.flags import OUT, PATH, check_writable


@click.command(short_help="Show what limits a run, and write a page.")
@click.argument("run", type=PATH)
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
    console.say(*(f"note: {note}" for note in written.notes))
    console.say(f"wrote {written.page}")
    if written.pictures:
        console.say(f"wrote {len(written.pictures)} pictures in {written.pictures[0].parent}")


@click.command(short_help="List the runs of a folder.")
@click.argument("root", type=PATH, default=Path("runs"))
def runs(root: Path) -> None:
    """List the runs in the folder ROOT (runs): how far each came, its losses and its speed.

    The step of the best held-out loss stands behind it in parentheses.
    """
    from dearmpi.report.draw.units import align
    from dearmpi.train.run.run_summary import table_of_runs

    Console(speaks=True, needed=True).say(*align(table_of_runs(root)))


@click.command(short_help="Show how runs differ.")
@click.argument("run_folders", metavar="A B...", nargs=-1, type=PATH)
def compare(run_folders: tuple[Path, ...]) -> None:
    """Show the settings in which the runs A, B ... differ, and their results."""
    from dearmpi.report.draw.units import align
    from dearmpi.train.run.run_summary import table_of_differences

    if len(run_folders) < 2:
        raise click.UsageError("give the folders of two runs or more")
    Console(speaks=True, needed=True).say(*align(table_of_differences(run_folders)))


@click.group()
def trace() -> None:
    """Work with traces of dear-train run --trace."""


@trace.command(short_help="Put all ranks' traces into one file.")
@click.argument("run", type=PATH)
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
    from dearmpi.report.draw.units import count_text
    from dearmpi.report.read.trace import merge as merge_traces

    check_writable(out)
    merged = merge_traces(run, out)
    Console(speaks=True).say(
        f"wrote {merged.path}: {merged.num_events} events of "
        f"{count_text(merged.num_ranks, 'rank')}, clocks aligned within "
        f"{merged.uncertainty_us / 1e3:.2f} ms",
        *(f"note: {note}" for note in merged.notes),
    )


@click.group()
def checkpoint() -> None:
    """Look into checkpoints, and export models."""


@checkpoint.command(short_help="Describe and verify a checkpoint.")
@click.argument("path", type=PATH)
def show(path: Path) -> None:
    """Describe the checkpoint at PATH, or the latest of the run folder PATH, and verify it.

    Of a folder of runs, such as `runs`, list the runs and the newest checkpoint of each.
    """
    from dearmpi.report.draw.units import align
    from dearmpi.train.checkpoint.inspection import describe, describe_runs

    rows = describe_runs(path)
    table = align([row[:-1] for row in rows])
    lines = [f"{line}  {row[-1]}".rstrip() for line, row in zip(table, rows, strict=True)]
    Console(speaks=True, needed=True).say(*(lines or describe(path)))


@checkpoint.command(short_help="Write the model of a checkpoint to a file.")
@click.argument("path", type=PATH)
@click.argument("destination", type=PATH)
@click.option("--overwrite", is_flag=True, help="replace DESTINATION if it exists")
def export(path: Path, destination: Path, *, overwrite: bool) -> None:
    """Write the model of the checkpoint or run folder at PATH to DESTINATION.

    DESTINATION is a plain state dict for inference: safetensors if its name ends in
    .safetensors, and a file for torch.load if it ends in .pt or .pth.
    """
    from dearmpi.train.checkpoint.inspection import export as export_model

    export_model(path, destination, overwrite=overwrite)
    Console(speaks=True).say(f"wrote {destination}")
