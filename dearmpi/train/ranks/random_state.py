"""Random numbers of torch, numpy and ``random``: seeded, captured as plain JSON data, restored."""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dearmpi.errors import CheckpointError


def seed_all(*parts: int) -> None:
    """Seed torch, numpy and ``random`` from ``parts``: the same parts, the same numbers, and other
    parts others.
    """
    # numpy fills up with zeros: (5,) and (5, 0, 0) would be one.
    words = np.random.SeedSequence((len(parts), *parts)).generate_state(3, np.uint32)
    torch.manual_seed(int(words[0]))
    np.random.seed(int(words[1]))
    random.seed(int(words[2]))


def capture_random_state() -> dict[str, Any]:
    """Return this process's random states: torch on the CPU, numpy, ``random``, and torch on the
    current CUDA device where CUDA is in use."""
    state: dict[str, Any] = {
        "torch": _pack(torch.get_rng_state()),
        "numpy": _capture_numpy(),
        "python": _capture_python(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = _pack(torch.cuda.get_rng_state())
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Undo ``capture_random_state``.

    Raises CheckpointError when the state is not one, or is of a library that numbers otherwise.
    """
    try:
        torch.set_rng_state(_unpack(state["torch"]))
        _restore_numpy(state["numpy"])
        _restore_python(state["python"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(_unpack(state["cuda"]))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"the random state in the checkpoint does not fit this torch {torch.__version__} "
            f"and numpy {np.__version__}: {error}; resume with the versions that wrote it",
            code="random-state-misfit",
        ) from error


def _pack(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _unpack(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _pack_words(words: Sequence[int] | np.ndarray[Any, Any]) -> str:
    """32-bit words, little-endian."""
    return base64.b64encode(np.asarray(words, dtype="<u4").tobytes()).decode("ascii")


def _unpack_words(text: str) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.frombuffer(base64.b64decode(text), dtype="<u4").astype(np.uint32)


def _capture_numpy() -> dict[str, Any]:
    """State of numpy's global generator, which is a Mersenne twister."""
    state: Any = np.random.get_state(legacy=False)
    return {
        "key": _pack_words(state["state"]["key"]),
        "position": int(state["state"]["pos"]),
        "has_gauss": int(state["has_gauss"]),
        "gauss": float(state["gauss"]),
    }


def _restore_numpy(state: Mapping[str, Any]) -> None:
    key = _unpack_words(state["key"])
    np.random.set_state(("MT19937", key, state["position"], state["has_gauss"], state["gauss"]))


def _capture_python() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    return {"version": version, "words": _pack_words(words), "gauss": gauss}


def _restore_python(state: Mapping[str, Any]) -> None:
    words = tuple(int(word) for word in _unpack_words(state["words"]))
    random.setstate((state["version"], words, state["gauss"]))
