"""Config file: settings in YAML, as ``--config`` names it and a run folder keeps it.

A file of its own, since ``sources`` imports it only where a file is read: --help waits for no YAML.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from dearmpi.errors import ConfigError
from dearmpi.plan.data.fields import regular_file

# YAML 1.1 makes a number of 20261121_1, and of 12:30. What is one follows from the setting instead.
_RECOGNISED = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "merge"))


class _ConfigLoader(yaml.SafeLoader):
    """Leaves all but null, true, false and `<<` as it is written, and takes no key twice."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in known if tag in _RECOGNISED]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As the base class, which would keep the last of several values."""
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        seen: set[str] = set()
        for key in (key for key, _ in pairs if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                line = key.start_mark.line + 1
                raise ConfigError(
                    f"{key.value} is given twice in {self.name}, again in line {line}; "
                    "give it once",
                    code="given-twice",
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def _describe(error: Exception) -> str:
    """What is wrong, in one line; YAML's own text has several, and calls a tab a token."""
    mark = getattr(error, "problem_mark", None)
    if mark is not None and "'\\t'" in str(error):
        return f"line {mark.line + 1} has a tab where only blanks may stand"
    return " ".join(str(error).split())


def read_config(path: Path) -> dict[Any, object]:
    """Read the settings in the file at ``path``, by key; numbers are text.

    Raises ConfigError for a file that cannot be read or holds something else, and for a key that
    is given twice.
    """
    try:
        loader = _ConfigLoader(regular_file(path).read_text(encoding="utf-8"))
        loader.name = str(path)
        content = loader.get_single_data()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(
            f"cannot read the config file {path}: {reason}; give a file of settings in YAML",
            code="unreadable-file",
        ) from error
    except ConfigError:  # is a ValueError
        raise
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        # Such as a `!!timestamp` that is none.
        reason = _describe(error)
        raise ConfigError(
            f"the config file {path} is no YAML: {reason}; write one `name: value` to a line",
            code="malformed-file",
        ) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"the config file {path} holds a {type(content).__name__}; it must hold settings, "
            "one `name: value` to a line",
            code="malformed-file",
        )
    return content
