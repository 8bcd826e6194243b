"""dear-train checkpoint: look at a checkpoint, or take the model out of it."""

from __future__ import annotations

from pathlib import Path

import click

from dearmpi.cli.console import Console


@click.group()
def checkpoint() -> None:
    """Look into checkpoints and export models from them."""


@checkpoint.command()
@click.argument("path", type=click.Path(path_type=Path))
def show(path: Path) -> None:
    """Describe the checkpoint at PATH, or the latest of the run folder PATH, and verify it.

    Of a folder of runs, such as `runs`, list the runs and the newest checkpoint of each.
    """
    from dearmpi.bench.table import align
    from dearmpi.train.checkpoint.inspection import describe, describe_runs

    rows = describe_runs(path)
    table = align([row[:-1] for row in rows])
    lines = [f"{line}  {row[-1]}".rstrip() for line, row in zip(table, rows, strict=True)]
    Console(speaks=True, needed=True).say_all(lines or describe(path))


@checkpoint.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("destination", type=click.Path(path_type=Path))
@click.option("--overwrite", is_flag=True, help="replace DESTINATION if it exists")
def export(path: Path, destination: Path, *, overwrite: bool) -> None:
    """Write the model of the checkpoint or run folder at PATH to DESTINATION.

    DESTINATION is a plain state dict for inference: safetensors if its name ends in
    .safetensors, and a file for torch.load if it ends in .pt or .pth.
    """
    from dearmpi.train.checkpoint.inspection import export as export_model

    export_model(path, destination, overwrite=overwrite)
    Console(speaks=True).say(f"wrote {destination}")
