"""Noise of a token as a hash: keys of rows, and the uniform number of a token under a key. Needs numpy alone.

`backends.reference.noise` defines the Gumbel noise that samplers make of it; watermark detectors use the uniform number
itself.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

GOLDEN = 0x9E3779B97F4A7C15
POSITION = 0xD1342543DE82EF95
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
LAST_SHIFT = 31


def row_keys(seeds: np.ndarray, positions: np.ndarray) -> npt.NDArray[np.int64]:
    """int64 (bit pattern of uint64) key of each row: splitmix64 of its seed and the position to be sampled."""
    with np.errstate(over="ignore"):
        return _mixed(seeds.astype(np.uint64) + positions.astype(np.uint64) * np.uint64(POSITION)).view(np.int64)


def uniforms(keys: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """The uniform number in (0, 1) of each token under its key, to 23 bits: its noise is -log(-log(u))."""
    with np.errstate(over="ignore"):
        x = _mixed(keys.view(np.uint64) + tokens.astype(np.uint64) * np.uint64(GOLDEN))
    return ((x >> np.uint64(41)).astype(np.float64) + 0.5) * 2.0**-23


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    for shift, factor in MIX:
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(LAST_SHIFT))
