"""Values of the small exchanges outside of training: numbers as buffers, and texts and objects as
bytes.

In place of an object that cannot be sent travels a sentence: every rank raises the same error, and
none waits for another. Only the ranks of one job write and read these bytes.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dearmpi.errors import ConfigError


def plain_numbers(values: Any) -> Any:
    """A float, or lists of floats, of numbers and tensors.

    Tensors may require gradients or lie on a device. Raises ConfigError for other types.
    """
    if hasattr(values, "tolist"):
        return values.tolist()
    if hasattr(values, "__iter__") and not isinstance(values, str | bytes | Mapping):
        return [plain_numbers(value) for value in values]
    try:
        return float(values)
    except OverflowError as error:
        raise ConfigError(
            f"a whole number of {values.bit_length()} bits is larger than any of 64-bit floating "
            "point; give a smaller one, or call all_gather_object(x) for any object",
            code="out-of-range",
        ) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"a value is of type {type(values).__name__}, not a number; give numbers, or call "
            "all_gather_object(x) for any object",
            code="wrong-type",
        ) from error


def flat_numbers(values: Any) -> npt.NDArray[np.float64]:
    """``values``, or a single number, in one dimension. Raises ConfigError for other shapes."""
    numbers = plain_numbers(values)
    try:
        array = np.atleast_1d(np.array(numbers, dtype=np.float64))
    except (TypeError, ValueError) as error:
        plain_numbers(numbers)  # what an array holds need not be numbers; raises for others
        raise ConfigError(
            "values are lists of unequal lengths; give them as one flat list",
            code="values-not-flat",
        ) from error
    if array.ndim > 1:
        raise ConfigError(
            f"values have the shape {array.shape}; give them as one flat list",
            code="values-not-flat",
        )
    return array


class HostBuffer:
    """A 1-D numpy array with the few tensor methods that collectives use."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array = array

    @property
    def dtype(self) -> Any:
        """The array's dtype; its name is the same as torch's without the prefix."""
        return self.array.dtype

    def __getitem__(self, index: Any) -> HostBuffer:
        return HostBuffer(self.array[index])

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def numel(self) -> int:
        return int(self.array.size)

    def is_contiguous(self) -> bool:
        return self.array.flags.c_contiguous

    def element_size(self) -> int:
        return int(self.array.itemsize)

    def new_empty(self, size: int) -> HostBuffer:
        return HostBuffer(np.empty(size, self.array.dtype))

    def clone(self) -> HostBuffer:
        return HostBuffer(self.array.copy())

    def copy_(self, source: HostBuffer) -> HostBuffer:
        self.array[...] = source.array
        return self

    def add_(self, other: HostBuffer) -> HostBuffer:
        with np.errstate(all="ignore"):  # as torch: infinity and NaN are results like others
            self.array += other.array
        return self


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
    """``text`` as bytes; it may hold any characters. Raises ConfigError for other types."""
    if not isinstance(text, str):
        raise ConfigError(
            f"a text is of type {type(text).__name__}; give a str, or call all_gather_object(x) or "
            "broadcast_object(x) for any object",
            code="wrong-type",
        )
    return text.encode(errors=_ERRORS)


def decode(data: bytes) -> str:
    """The text that ``encode`` made ``data`` of."""
    return data.decode(errors=_ERRORS)
