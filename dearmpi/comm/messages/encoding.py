"""Texts and objects as bytes.

In place of an object that cannot be sent travels a sentence: every rank raises the same error, and
none waits for another. Only the ranks of one job write and read these bytes.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence

from dearmpi.errors import ConfigError

MOST_BYTES = 2**31 - 1  # in one operation, which counts them in an int
_OBJECT, _SENTENCE = b"O", b"S"


def pack(value: object, *, copies: int, origin: str) -> bytes:
    """``value`` for ``unpack``, or the sentence why it cannot be sent.

    copies: how many objects of this size are received together.
    origin: the rank, with its host.
    """
    try:
        data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # an object's own methods may raise anything
        reason = (
            f"an object of type {type(value).__name__} on {origin} cannot be pickled "
            f"({type(error).__name__}: {error}); send plain values, lists, dicts or tensors"
        )
        return _SENTENCE + reason.encode(errors="replace")
    if (len(data) + 2) * copies > MOST_BYTES:
        reason = (
            f"an object of type {type(value).__name__} on {origin} takes {len(data)} bytes, and "
            f"{copies} of this size exceed the {MOST_BYTES} bytes of one call; send it in parts, "
            "or in a file that all ranks read"
        )
        return _SENTENCE + reason.encode(errors="replace")
    return _OBJECT + data


def unpack(sent: Sequence[bytes], *, reader: str) -> list[object]:
    """The objects. Raises ConfigError, alike on all ranks, if one of them could not be sent."""
    for data in sent:
        if data[:1] == _SENTENCE:
            raise ConfigError(data[1:].decode(), code="object-not-sent")
    return [_load(data[1:], reader) for data in sent]


def _load(data: bytes, reader: str) -> object:
    try:
        return pickle.loads(data)
    except Exception as error:
        raise ConfigError(
            f"{reader} cannot unpickle an object that was sent ({type(error).__name__}: {error}); "
            "have all ranks import the same modules and versions",
            code="object-not-read",
        ) from error


_ERRORS = "surrogatepass"  # file names may hold lone surrogates


def encode(text: str) -> bytes:
    """``text`` as bytes; it may hold any characters."""
    return text.encode(errors=_ERRORS)


def decode(data: bytes) -> str:
    """The text that ``encode`` made ``data`` of."""
    return data.decode(errors=_ERRORS)
