"""The description that an index shows: README, whose links lead to files that an index lacks."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent


def description(readme: str, repository: str | None) -> str:
    """``readme`` with links into ``repository``; without its address as text, without pictures."""

    def replace(found: re.Match[str]) -> str:
        picture, text, target = found.groups()
        if re.match(r"[a-z]+:", target):
            return found[0]
        if repository is not None:
            return f"{picture}[{text}]({repository}/{'raw' if picture else 'blob'}/main/{target})"
        return "" if picture else text

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", replace, readme)


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    setup(
        long_description=description(
            (ROOT / "README.md").read_text(), project.get("urls", {}).get("Repository")
        ),
        long_description_content_type="text/markdown",
    )
