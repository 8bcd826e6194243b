"""Fields of a JSON object, read strictly: what is missing or of another kind is named."""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dearmpi.config import nearest
from dearmpi.errors import ConfigError
from dearmpi.version import __version__

MOST_INTEGER = 2**53  # beyond, readers of JSON in other languages round


class Fields:
    """A JSON object and where it stands, such as ``profile.json: layers[3]``."""

    def __init__(self, values: Any, place: str, cure: str = "") -> None:
        """Raises ConfigError unless ``values`` is an object. cure: what errors add."""
        self.place, self.cure = place, cure
        if not isinstance(values, dict):
            raise ConfigError(
                f"{place} is {_kind(values)}; it must be an object in braces{self._cured}",
                code="malformed-file",
            )
        self._values = values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def names(self) -> tuple[str, ...]:
        """All keys, in their order."""
        return tuple(self._values)

    def text(self, key: str, default: str | None = None) -> str:
        """The string at ``key``."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.problem(key, f"is {_kind(value)}; it must be a text")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """The finite number at ``key``, 0 or more."""
        return self._number(key, "is", self._get(key, default))

    def numbers(self, key: str) -> tuple[float, ...]:
        """The list of such numbers at ``key``."""
        return tuple(self._number(key, "holds", value) for value in self.items(key))

    def _number(self, key: str, verb: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.problem(key, f"{verb} {_kind(value)}; it must be a number")
        if not 0 <= value <= sys.float_info.max:  # of whole numbers JSON may hold larger ones
            raise self.problem(key, f"{verb} {_kind(value)}; it must be 0 or more, and finite")
        return float(value)

    def integer(self, key: str, default: int | None = None, *, least: int = 0) -> int:
        """The whole number at ``key``, ``least`` or more."""
        value = self._get(key, default)
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not (is_whole and least <= value <= MOST_INTEGER):
            raise self.problem(
                key, f"is {_kind(value)}; it must be a whole number from {least} to {MOST_INTEGER}"
            )
        return int(value)

    def truth(self, key: str, default: bool | None = None) -> bool:
        """The true or false at ``key``."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.problem(key, f"is {_kind(value)}; it must be true or false")
        return value

    def items(self, key: str, default: list[Any] | None = None) -> list[Any]:
        """The list at ``key``."""
        value = self._get(key, default)
        if not isinstance(value, list):
            raise self.problem(key, f"is {_kind(value)}; it must be a list")
        return value

    def texts(self, key: str, default: list[Any] | None = None) -> tuple[str, ...]:
        """The list of strings at ``key``."""
        values = self.items(key, default)
        for value in values:
            if not isinstance(value, str):
                raise self.problem(key, f"holds {_kind(value)}; it must hold texts")
        return tuple(values)

    def fields(self, key: str) -> Fields:
        """The object at ``key``."""
        return Fields(self._get(key, None), f"{self.place}: {key}", self.cure)

    def each(self, key: str) -> Iterator[Fields]:
        """The objects of the list at ``key``."""
        for number, value in enumerate(self.items(key)):
            yield Fields(value, f"{self.place}: {key}[{number}]", self.cure)

    def problem(self, key: str, what: str) -> ConfigError:
        """The error that ``key`` ``what``."""
        return ConfigError(f"{self.place}: {key} {what}{self._cured}", code="malformed-file")

    @property
    def _cured(self) -> str:
        return self.cure and f"; {self.cure}"

    def _get(self, key: str, default: Any) -> Any:
        if key in self._values:
            return self._values[key]
        if default is None:
            raise self.problem(key, "is missing")
        return default


_KINDS = {
    "layers": "a profile, as dear-train profile writes it",
    "reduce_scatter": "a calibration, as dear-train calibrate writes it",
    "buckets": "a plan, as dear-train plan writes it",
    "steps": "a collective's steps, as JSON",
    "racks": 'a topology, as {"racks": {"left": ["n0", "n1"], "right": ["n2"]}}',
}
"""The files of this package, by a key that stands in no other."""


def regular_file(path: str | Path) -> Path:
    """``path``, which leads to a regular file. Raises OSError for anything else: a program that
    opens a FIFO waits for another one that writes.
    """
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        kind = "a FIFO or pipe" if stat.S_ISFIFO(mode) else "a device or socket"
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
    return Path(path)


def read_text(path: str | Path, *, mark: str, words: Sequence[str] = ()) -> str:
    """All of the file at ``path``, of the kind ``mark``. Raises ConfigError if it has no text.

    words: what could have been meant in the place of a file.
    """
    kind = _KINDS[mark]
    try:
        return regular_file(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = kind.split(",")[0].removeprefix("a ")
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(
            f"cannot read the {what} {path}: {reason}; {nearest(str(path), words)}give {kind}",
            code="unreadable-file",
        ) from None


def read_fields(text: str, place: str, *, mark: str, cure: str) -> Fields:
    """The object that ``text`` spells; ``place`` names it in errors, such as a file's path.

    mark: the key by which the wanted kind of file is known. cure: for a file of this kind that is
    damaged. Raises ConfigError if it is no JSON, no object, or of another kind.
    """
    try:
        values = json.loads(text, object_pairs_hook=_without_repeats)
    except _RepeatedKey as error:
        raise ConfigError(
            f"{place} has {error} twice in one object, of which only one would count; {cure}",
            code="malformed-file",
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{place} is not JSON, or is cut off ({error}); give {_KINDS[mark]}",
            code="malformed-file",
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"{place} is {_kind(values)}, and no object in braces; give {_KINDS[mark]}",
            code="malformed-file",
        )
    fields = Fields(values, place, cure)
    if mark not in fields and "format" not in fields:
        raise ConfigError(
            f"{place} is of another kind: it has no {mark}; give {_KINDS[mark]}",
            code="file-of-other-kind",
        )
    for key, kind in _KINDS.items():
        if mark not in fields and key in fields:
            raise ConfigError(f"{place} is {kind}; give {_KINDS[mark]}", code="file-of-other-kind")
    return fields


class _RepeatedKey(Exception):
    """A key that stands twice in one object."""


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _RepeatedKey(_kind(next(key for key in found if keys.count(key) > 1)))
    return found


def check_format(data: Fields, place: str, *, current: int, default: int | None) -> str:
    """The version of dearmpi that wrote the file; ``unknown`` without one.

    default: the format of a file that names none; None: it must name one. Raises ConfigError unless
    the format is ``current``.
    """
    written, version = data.integer("format", default), data.text("version", "unknown")
    if written != current:
        raise ConfigError(
            f"{place} has format {written}, written by dearmpi {version}; this is dearmpi "
            f"{__version__}, which reads format {current}: {data.cure}",
            code="other-format-version",
        )
    return version


@contextmanager
def errors_name(place: str) -> Iterator[None]:
    """Inside, every ConfigError begins with ``place``, such as a file's path."""
    try:
        yield
    except ConfigError as error:
        if str(error).startswith(place):
            raise
        raise ConfigError(f"{place}: {error}", code=error.code) from None


def _kind(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
