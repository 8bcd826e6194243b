"""Host buffers: numbers of the small exchanges that ranks make outside of training."""

from __future__ import annotations

from collections.abc import Mapping
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
    except ValueError as error:
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
        """Address of the first element."""
        return int(self.array.ctypes.data)

    def numel(self) -> int:
        """Number of elements."""
        return int(self.array.size)

    def is_contiguous(self) -> bool:
        """Whether its elements lie side by side, in order."""
        return self.array.flags.c_contiguous

    def element_size(self) -> int:
        """Bytes per element."""
        return int(self.array.itemsize)

    def new_empty(self, size: int) -> HostBuffer:
        """An uninitialised buffer of the same dtype."""
        return HostBuffer(np.empty(size, self.array.dtype))

    def clone(self) -> HostBuffer:
        """A copy."""
        return HostBuffer(self.array.copy())

    def copy_(self, source: HostBuffer) -> HostBuffer:
        """Overwrite with ``source``."""
        self.array[...] = source.array
        return self

    def add_(self, other: HostBuffer) -> HostBuffer:
        """Add ``other`` in place."""
        self.array += other.array
        return self
