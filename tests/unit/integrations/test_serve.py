"""A framework that is missing, and settings that take another way than DDP."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import pytest

from dearmpi.errors import ConfigError
from dearmpi.integrations.serve import import_framework, refuse
from tests.codes import raises


def test_a_missing_framework_is_named_with_its_package() -> None:
    with raises(ConfigError, "framework-missing", "pip install a-package"):
        import_framework("dearmpi_has_no_such_framework", "a-package")


@pytest.mark.parametrize("name", ["accelerate", "transformers", "lightning"])
def test_a_framework_is_imported_by_its_own_file_alone(name: str) -> None:
    if find_spec(name) is None:
        with raises(ConfigError, "framework-missing", "pip install"):
            import_module(f"dearmpi.integrations.{name}")


def test_settings_of_other_ways_are_refused_by_name() -> None:
    refuse(None, "fsdp")
    with raises(ConfigError, "ddp-not-served", "without fsdp"):
        refuse("full_shard", "fsdp")
