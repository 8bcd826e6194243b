"""A program that stands in for another."""

from __future__ import annotations

from pathlib import Path


def stand_in(path: Path, body: str) -> None:
    """A shell script at ``path``, that may be run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
