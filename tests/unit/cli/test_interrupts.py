"""Ctrl-C while modules are imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dearmpi.cli.interrupts import loading

ROOT = Path(__file__).parents[3]
# Interrupts itself where the commands begin to load, and would go on for ever.
INTERRUPTED = """
import builtins, os, signal, sys
from dearmpi.cli.main import main

def load(name, *rest, imported=builtins.__import__):
    if name == "click":
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()
    return imported(name, *rest)

builtins.__import__ = load
sys.exit(main(["run"]))
"""


def test_an_interrupt_while_commands_load_ends_silently_with_130() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_afterwards_an_interrupt_is_an_exception_again() -> None:
    with pytest.raises(KeyboardInterrupt):
        with loading():
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()


def test_a_handler_of_the_callers_own_stays() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with loading():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
