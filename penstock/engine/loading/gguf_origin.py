"""Where one tensor of a checkpoint comes from in a GGUF file, and what has to be undone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.engine.loading.gguf import RawTensor


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """How to obtain one Hugging Face tensor: the GGUF tensor and the steps to apply."""

    name: str
    heads: int = 0
    """Not 0: rows are interleaved within this many heads."""
    expert: int = -1
    """Not -1: the tensor is this slice of a stack of experts."""
    half: int = -1
    """Not -1: of that slice the first or the second half of the rows."""
    offset: float = 0.0
    """Added to the weights."""
    row: bool = False
    """A matrix of one row, which is stored as a vector."""
    values: str = ""
    """Not empty: the matrix that makes keys and values of latents. The GGUF tensor holds its key rows, the matrix of
    each head transposed, and this one its value rows."""
    rows: npt.NDArray[np.int64] | None = None
    """Which of its rows, in which order; see `gguf_delta`. `columns` likewise."""
    columns: npt.NDArray[np.int64] | None = None
    log_of_negative: bool = False
    """The logarithm of what is stored, which is negative, without its sign."""
    given: RawTensor | None = None
    """A number of the metadata, whose key `name` is."""
    flat: bool = False
    """A vector, stored as a matrix."""
    shape: tuple[int, ...] = ()
    """Not empty: the tensor's shape, which is stored with other axes of one."""
    depthwise: bool = False
    """Weights of a convolution of each channel on its own, stored without the axis of channels."""

    @property
    def reordered(self) -> bool:
        moved = self.rows is not None or self.columns is not None
        return moved or self.log_of_negative or self.flat or self.depthwise or bool(self.shape)
