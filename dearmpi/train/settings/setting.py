"""Setting: what the command line, the environment and the file must know of one run setting."""

from __future__ import annotations

import ast
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dearmpi.config import nearest
from dearmpi.errors import ConfigError

Kind = Literal[
    "integer",
    "number",
    "duration",
    "text",
    "choice",
    "switch",
    "texts",
    "literals",
    "numbers",
    "range",
    "several",
]
Section = Literal["Task", "Length", "Optimizer", "Communication", "Numerics", "Run"]

_SWITCH = {"true": True, "yes": True, "on": True, "1": True} | {
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
_SECONDS_OF = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting.

    kind: ``texts`` are pairs of a name and text, ``literals`` pairs of a name and a plain Python
        value. ``numbers`` are several numbers, ``range`` two whole ones, as START:STOP, ``several``
        some of the choices, separated by commas.
        A ``duration`` is in seconds, or text such as 90m.
    flag: without the dashes; the environment variable and the file's key follow from the name.
    metavar: how the value is shown in help. choices: of words; of an integer, beside numbers.
    least, above, most: bounds of a number.
    fixed: a run that is resumed must keep it.
    takes_own: beside the choices, a function of the user's as FILE.py:NAME or package.module:NAME.
    takes_numbers: beside the choices, a number for each rank, separated by commas.
    usual: the short help lists it.
    """

    section: Section
    kind: Kind
    help: str
    flag: str = ""
    metavar: str = ""
    choices: tuple[str, ...] = ()
    least: float | None = None
    above: float | None = None
    most: float | None = None
    fixed: bool = False
    takes_own: bool = False
    takes_numbers: bool = False
    usual: bool = False

    @property
    def is_pairs(self) -> bool:
        """Whether the setting may be given several times, as NAME=VALUE."""
        return self.kind in ("texts", "literals")

    def convert(self, value: object, *, label: str) -> Any:
        """Turn ``value`` (text, or what YAML made of it) into this setting's type.

        label: what to call the setting in the ConfigError that is raised for a wrong value.
        """
        match self.kind:
            case "integer" if value in self.choices:
                return value
            case "integer":
                return self._check_bounds(_to_integer(value, label, words=self.choices), label)
            case "number":
                return self._check_bounds(_to_number(value, label), label)
            case "duration":
                return self._check_bounds(_to_seconds(value, label), label)
            case "switch":
                return _to_switch(value, label)
            case "choice" if self.takes_numbers and not _is_word(value):
                return _to_numbers(value, label)
            case "choice":
                return self._check_choice(_to_text(value, label), label)
            case "text":
                return _to_filled(value, label)
            case "numbers":
                return _to_numbers(value, label)
            case "range":
                return _to_range(value, label)
            case "several":
                parts = value.split(",") if isinstance(value, str) else value
                if not isinstance(parts, Sequence):
                    raise ConfigError(
                        f"{label} is {value!r}; it must be some of {', '.join(self.choices)}, "
                        "separated by commas",
                        code="malformed-value",
                    )
                texts = (_to_text(part, label).strip() for part in parts)
                return tuple(self._check_choice(text, label) for text in texts)
            case "texts":
                pairs = _to_pairs(value, label)
                return {name: _to_text(text, f"{label}: {name}") for name, text in pairs.items()}
            case "literals":
                return {name: _to_literal(text) for name, text in _to_pairs(value, label).items()}

    def _check_bounds(self, value: Any, label: str) -> Any:
        if self.least is not None and value < self.least:
            raise ConfigError(
                f"{label} is {value}; it must be at least {self.least:g}", code="out-of-range"
            )
        if self.above is not None and value <= self.above:
            raise ConfigError(
                f"{label} is {value}; it must be above {self.above:g}", code="out-of-range"
            )
        if self.most is not None and value > self.most:
            raise ConfigError(
                f"{label} is {value}; it must be at most {self.most:g}", code="out-of-range"
            )
        return value

    def _check_choice(self, value: str, label: str) -> str:
        if value not in self.choices and not (self.takes_own and ":" in value):
            or_numbers = ", or give a number for each rank, such as 2,1,1" * self.takes_numbers
            raise ConfigError(
                f"{label} is {value!r}; {nearest(value, self.choices)}choose one of "
                f"{', '.join(self.choices)}{or_numbers}",
                code="unknown-choice",
            )
        return value


def setting(default: Any, section: Section, kind: Kind, text: str, **details: Any) -> Any:
    """A dataclass field that is a setting; ``details`` are further fields of ``Setting``."""
    about = Setting(section, kind, text, **details)
    metadata = {"setting": about}
    if default == {}:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def named(about: Setting, name: str) -> Setting:
    """``about`` with its flag, which follows from ``name`` unless it has one of its own."""
    return replace(
        about,
        flag=about.flag or name.replace("_", "-"),
        metavar=about.metavar or _METAVARS.get(about.kind, ""),
    )


_METAVARS = {
    "integer": "N",
    "number": "X",
    "duration": "TIME",
    "text": "TEXT",
    "texts": "NAME=VALUE",
    "literals": "NAME=VALUE",
    "numbers": "X,X,...",
    "range": "START:STOP",
}


def _to_integer(value: object, label: str, *, words: Sequence[str] = ()) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            pass
    near = nearest(str(value), words)
    raise ConfigError(
        f"{label} is {value!r}; {near}it must be {' or '.join(('a whole number', *words))}",
        code="wrong-type",
    )


def _to_number(value: object, label: str) -> float:
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            number = float(value)
        except ValueError:
            pass
        else:
            if math.isfinite(number):
                return number
            raise ConfigError(
                f"{label} is {value!r}; it must be a finite number", code="out-of-range"
            )
    raise ConfigError(f"{label} is {value!r}; it must be a number", code="wrong-type")


def _to_seconds(value: object, label: str) -> float:
    unit = value[-1:] if isinstance(value, str) else ""
    if unit not in _SECONDS_OF:
        return _to_number(value, f"{label} (in seconds, or with a unit: 90s, 45m, 1.5h, 1d)")
    return _to_number(str(value)[:-1], label) * _SECONDS_OF[unit]


def _to_switch(value: object, label: str) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _SWITCH:
        return _SWITCH[value.lower()]
    raise ConfigError(f"{label} is {value!r}; it must be true or false", code="wrong-type")


def _to_text(value: object, label: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int, float)):
        return str(value)
    raise ConfigError(f"{label} is {value!r}; it must be text", code="wrong-type")


def _to_filled(value: object, label: str) -> str:
    if isinstance(value, bool):  # a bare `no`, as in `name: no`
        raise ConfigError(
            f"YAML reads {label} as {value}; put the value in quotes", code="wrong-type"
        )
    text = _to_text(value, label)
    if not text.strip():  # as of a shell's variable that is not set
        raise ConfigError(
            f"{label} is empty or blank; give a value, or leave it out", code="malformed-value"
        )
    return text


def _is_word(value: object) -> bool:
    """Whether ``value`` can only be one of the choices, not numbers."""
    return isinstance(value, str) and not any(char.isdigit() for char in value)


def _to_numbers(value: object, label: str) -> tuple[float, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, Sequence) or not parts:
        raise ConfigError(
            f"{label} is {value!r}; it must be numbers, separated by commas", code="malformed-value"
        )
    return tuple(_to_number(part, label) for part in parts)


def _to_range(value: object, label: str) -> tuple[int, int]:
    parts = value.split(":") if isinstance(value, str) else value
    if not isinstance(parts, Sequence) or len(parts) != 2:
        raise ConfigError(f"{label} is {value!r}; it must be START:STOP", code="malformed-value")
    start, stop = (_to_integer(part, label) for part in parts)
    if not 1 <= start < stop:
        raise ConfigError(
            f"{label} is {start}:{stop}; START must be at least 1, and STOP above START",
            code="out-of-range",
        )
    return start, stop


def _to_pairs(value: object, label: str) -> dict[str, object]:
    """A mapping as it is; ``a=1`` and ``b=2`` from words, or from text that holds such words."""
    if isinstance(value, Mapping):
        return {str(name): part for name, part in value.items()}
    try:
        words = shlex.split(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ConfigError(
            f"{label} is {value!r}; it cannot be split into words: {error}", code="malformed-value"
        ) from error
    if not isinstance(words, Sequence):
        raise ConfigError(
            f"{label} is {value!r}; it must be NAME=VALUE pairs", code="malformed-value"
        )
    pairs: dict[str, object] = {}
    for word in words:
        name, equals, text = str(word).partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"{label} {word!r} must be NAME=VALUE", code="malformed-value")
        if name.strip() in pairs:
            raise ConfigError(
                f"{label} gives {name.strip()} twice; give it once", code="given-twice"
            )
        pairs[name.strip()] = text
    return pairs


def _to_literal(value: object) -> object:
    """Text as the plain Python value that it spells, if it spells one."""
    if isinstance(value, (list, tuple)):
        return tuple(_to_literal(part) for part in value)
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    try:
        literal = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value
    return tuple(literal) if isinstance(literal, list) else literal
