"""Host buffers for the small exchanges that ranks make outside of training."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class HostBuffer:
    """A 1-D numpy array with the few tensor methods that collectives ask for."""

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
