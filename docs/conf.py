"""Settings of the documentation site; bin/docs builds it.

The source folder is the repository, so that links from pages to README, benchmarks and tests are
links between pages. Docstrings of the package are plain text with lists ``name: meaning``;
``to_restructured_text`` turns these into bullets.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util import logging

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

project = "dearmpi"
author = "the authors of dearmpi"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_click"]
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "docs/*/*.md",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "benchmarks/README.md",
    "tests/README.md",
]
exclude_patterns = ["build", ".venv*"]
smartquotes = False  # else a flag in running text begins with one dash, which no command takes
html_theme = "furo"
html_title = "dearmpi"
html_copy_source = False
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["site.css"]
highlight_language = "text"
myst_heading_anchors = 3
myst_links_external_new_tab = False
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # torch's and numpy's classes in signatures
autodoc_typehints = "none"
autodoc_member_order = "bysource"
suppress_warnings = ["myst.header"]  # README begins with badges or a picture in other hosts

_ITEM = re.compile(r"^([\w*][\w*, ]*): (.*)$")
_log = logging.getLogger(__name__)


def to_restructured_text(lines: list[str]) -> list[str]:
    """The docstring with each ``name: meaning`` block as a list of bullets."""
    result: list[str] = []
    item: list[str] = []

    def close() -> None:
        if item:
            result.append(f"* {' '.join(item)}")
            item.clear()

    in_code = False
    for line in lines:
        found = None if in_code else _ITEM.match(line)
        if found:
            if not item and result and result[-1].strip():
                result.append("")
            close()
            item.extend([f"``{found[1]}``:", found[2].strip()])
        elif item and line.strip():
            item.append(line.strip())
        else:
            if item:
                close()
            result.append(line)
            if line.strip():
                in_code = line.rstrip().endswith("::") or (in_code and line.startswith(" "))
    close()
    return [*result, ""]


def process(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Rewrite a docstring in place; a public name without one fails the build."""
    if not any(lines):
        _log.warning("%s has no docstring", name)
    lines[:] = to_restructured_text(lines)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the rewriting of docstrings."""
    app.connect("autodoc-process-docstring", process)
    return {"parallel_read_safe": True}
