"""Write the reference pages that follow from the code: settings, errors, fields, classes, scale.

    python docs/generate.py            writes them into docs/reference/
    python docs/generate.py --check    writes nothing; status 1 if a page is not current

``bin/docs`` runs it, and a test compares the committed pages with ``pages()``.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a script, the package of this repository counts

from dearmpi import DistributedOptimizer, World, errors  # noqa: E402
from dearmpi.config import EngineConfig  # noqa: E402
from dearmpi.error_codes import CODES  # noqa: E402
from dearmpi.train.checkpoint.manifest import FORMAT, VERSION, Manifest  # noqa: E402
from dearmpi.train.settings.choices import RunChoices  # noqa: E402
from dearmpi.train.settings.setting import named  # noqa: E402
from docs.scale_page import scale_page  # noqa: E402

REFERENCE = ROOT / "docs" / "reference"
_ITEM = re.compile(r"^(\w+(?:, \w+)*): (.*?)(?=^\w+(?:, \w+)*: |\n\n|\Z)", re.M | re.S)
NOTE = "<!-- Written by docs/generate.py; do not edit. -->\n"


def table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table; ``|`` in cells is escaped."""
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )


def first_sentence(documented: object) -> str:
    """The first sentence of a docstring, on one line."""
    text = " ".join((inspect.getdoc(documented) or "").split())
    return re.split(r"(?<=\.) |:: ", text, maxsplit=1)[0]


def described(documented: object) -> dict[str, str]:
    """Meanings by name, of the lines ``name, name: meaning`` of a docstring."""
    text = inspect.getdoc(documented) or ""
    meanings: dict[str, str] = {}
    for names, meaning in _ITEM.findall(text):
        for name in names.split(", "):
            meanings[name] = " ".join(meaning.split()).removesuffix(".")
    return meanings


def settings_page() -> str:
    """Every setting of ``dear-train run``, by section, as its help describes it."""
    sections: dict[str, list[tuple[str, ...]]] = {}
    for field in fields(RunChoices):
        about = named(field.metadata["setting"], field.name)
        value = about.metavar or "|".join(about.choices)
        flag = f"`--{about.flag}{f' {value}' if value else ''}`"
        default = field.default if isinstance(field.default, (str, int, float)) else None
        shown = "" if default is None or "default:" in about.help else f"`{default}`"
        fixed = "yes" if about.fixed else ""
        sections.setdefault(about.section, []).append((flag, about.help, shown, fixed))
    heads = ("flag", "meaning", "default", "fixed")
    parts = [f"## {name}\n\n{table(heads, rows)}" for name, rows in sections.items()]
    intro = (
        "`--batch-size 32`, the variable `DEAR_TRAIN_BATCH_SIZE=32` and `batch_size: 32` in a "
        "`--config` file\nare the same setting. A resumed run must keep a *fixed* one. "
        "[Train from the command line](../how-to/run.md#settings)\nexplains where each may stand.\n"
    )
    return f"{NOTE}\n# Settings of dear-train run\n\n{intro}\n" + "\n".join(parts)


@cache
def raised_classes() -> dict[str, set[str]]:
    """By error code, the classes that the package raises with it."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "dearmpi").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            name = node.func.id if isinstance(node.func, ast.Name) else name
            name = "UsageError" if name == "Misuse" else name  # a row of engine/usage_errors
            if not inspect.isclass(getattr(errors, name, None)):
                continue
            for keyword in node.keywords:
                if keyword.arg == "code" and isinstance(keyword.value, ast.Constant):
                    found.setdefault(str(keyword.value.value), set()).add(name)
    return found


def errors_page() -> str:
    """The classes of errors with their exit codes, and every code with cause and cure."""
    classes = [
        (f"`{name}`", str(kind.exit_code), first_sentence(kind))
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, errors.DearError)
    ]
    raised = raised_classes()
    codes = [
        (
            f"`{code}`",
            ", ".join(f"`{name}`" for name in sorted(raised.get(code, ()))),
            about.cause,
            about.cure,
        )
        for code, about in sorted(CODES.items())
    ]
    return (
        f"{NOTE}\n# Errors\n\n"
        "Every error of dearmpi is a `dearmpi.errors.DearError` with an attribute `code`. Messages "
        "may change between\nversions; codes do not. `dear-train` ends with the class's exit code "
        "([all exit codes](../how-to/run.md#how-a-run-ends)).\n\n"
        f"## Classes\n\n{table(('class', 'exit code', 'meaning'), classes)}\n"
        f"## Codes\n\n{table(('code', 'class', 'cause', 'cure'), codes)}"
    )


def manifest_page() -> str:
    """The fields of a checkpoint's manifest, as its class documents them."""
    meanings = described(Manifest)
    rows = [
        ("`format`, `version`", "str, int", f"`{FORMAT}`, {VERSION}; another version is refused"),
        *((f"`{f.name}`", f"`{f.type}`", meanings.get(f.name, "")) for f in fields(Manifest)),
        ("`sha256`", "`str`", "of the other fields, as JSON without white space"),
    ]
    return (
        f"{NOTE}\n# Fields of manifest.json\n\n{table(('field', 'type', 'meaning'), rows)}\n"
        "[Checkpoints](checkpoints.md) describes the folder around it.\n"
    )


def own_members(kind: type) -> dict[str, object]:
    """Public members of ``kind`` and its bases in dearmpi, in the order of the source."""
    bases = [base for base in reversed(kind.__mro__) if base.__module__.startswith("dearmpi")]
    members = {name: value for base in bases for name, value in vars(base).items()}
    return {name: value for name, value in members.items() if not name.startswith("_")}


def attributes_of(kind: type) -> list[tuple[str, str]]:
    """A row for each attribute that the docstrings of ``kind`` and its bases name."""
    names: dict[str, list[str]] = {}  # by their meaning: some are described together
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("dearmpi"):
            for name, meaning in described(base).items():
                names.setdefault(f"{meaning}.", []).append(f"`{name}`")
    for name, value in own_members(kind).items():
        if isinstance(value, property):
            names.setdefault(first_sentence(value), []).append(f"`{name}`")
    return [(", ".join(together), meaning) for meaning, together in names.items()]


def methods_of(kind: type) -> list[tuple[str, str]]:
    """A row for each public method: how it is called, and the first sentence about it."""
    rows = []
    for name, value in own_members(kind).items():
        if callable(value):
            _, *parameters = inspect.signature(value).parameters.values()
            call = ", ".join(map(written, parameters))
            rows.append((f"`{name}({call})`", first_sentence(value)))
    return rows


def written(parameter: inspect.Parameter) -> str:
    """``name``, ``name=`` and a default that can be written so, or ``name=`` alone."""
    default = parameter.default
    if default is parameter.empty:
        return parameter.name
    return f"{parameter.name}={'' if callable(default) else repr(default)}"


def classes_page() -> str:
    """Settings, attributes and methods of the optimizer and the world, as docstrings say."""
    meanings = described(EngineConfig)
    settings = [(f"`{f.name}={f.default!r}`", meanings[f.name]) for f in fields(EngineConfig)]
    arguments = described(DistributedOptimizer.__init__)
    settings += [(f"`{name}=None`", meaning) for name, meaning in arguments.items()]
    heads = ("name", "meaning")
    return (
        f"{NOTE}\n# Optimizer and world\n\n"
        "[The Python interface](python.md) is the overview. Every rank must call *collective* "
        "methods, in one order.\n\n"
        f"## Settings of DistributedOptimizer\n\n{table(('setting', 'meaning'), settings)}\n"
        f"## Attributes of DistributedOptimizer\n\n"
        f"{table(heads, attributes_of(DistributedOptimizer))}\n"
        f"## Methods of DistributedOptimizer\n\n{table(heads, methods_of(DistributedOptimizer))}\n"
        f"## Attributes of World\n\n{table(heads, attributes_of(World))}\n"
        f"## Methods of World\n\n{table(heads, methods_of(World))}"
    )


def pages() -> dict[Path, str]:
    """The text of every generated page."""
    return {
        REFERENCE / "settings.md": settings_page(),
        REFERENCE / "errors.md": errors_page(),
        REFERENCE / "manifest.md": manifest_page(),
        REFERENCE / "classes.md": classes_page(),
        REFERENCE / "scale.md": scale_page(NOTE, table),
    }


def main(arguments: list[str]) -> int:
    """Write the pages, or compare them; return the exit status."""
    stale = [p for p, text in pages().items() if not p.exists() or p.read_text() != text]
    if "--check" in arguments:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not current: run python docs/generate.py")
        return 1 if stale else 0
    for path in stale:
        path.write_text(pages()[path])
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
