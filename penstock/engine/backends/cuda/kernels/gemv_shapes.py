"""Which kernel of `gemv` runs a linear, and in which shape: a table of what measured fastest on an H200."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.engine.backends.cuda.kernels.common import next_power_of_2


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """Shape of the launch: weight rows per program, columns per step.

    `rows` takes 1, 2 or 4 rows, and `block_k` = 8 elements per thread, or 16 of one byte: then x and every weight row
    are laid out over the threads alike, and nothing moves between threads until the final sum.
    """

    kernel: Literal["rows", "tiles"]
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def vendor_wins(rows: int, batch: int, weight_size: int) -> bool:
    """Several tokens and a middling number of rows: cuBLAS is a little ahead (measured on an H200)."""
    return batch > 1 and weight_size > 1 and 5000 <= rows <= 65536


def folds_norm(n: int, k: int, weight_size: int) -> bool:
    """Whether the norm before a linear of one token is worth no launch of its own: where every program multiplies few
    weights by few inputs, squaring these and reading the gains again costs less (measured for 16 bits on an H200)."""
    return weight_size > 1 and n * k < 8 << 20


def choose(n: int, k: int, batch: int, weight_size: int, gated: bool, adapted: bool = False) -> GemvConfig:
    """The launch shape for an [n, k] weight of `weight_size`-byte elements (measured on an H200)."""
    if batch == 1:
        return _choose_rows(n, k, weight_size, gated, adapted)
    block_n = 16 if n <= 2048 else 32
    step = 1024 // weight_size if block_n == 16 else 512 // weight_size
    # At least four steps, or there is nothing to pipeline.
    block_k = max(32, min(next_power_of_2(k) // 4, step))
    return GemvConfig("tiles", block_n, block_k, block_n // 16, 3 if gated else 4 if block_n == 16 else 5)


def _choose_rows(n: int, k: int, weight_size: int, gated: bool, adapted: bool) -> GemvConfig:
    fit = max(1, next_power_of_2(k) // 256)
    if weight_size == 1 and 8192 < k <= 16384 and not gated and not adapted:
        return GemvConfig("rows", 2, 8 * 512, 8, 1)
    if weight_size == 1:
        # Loads are half as wide, so more rows make up for it; small weights want more programs instead.
        warps, rows = (4, 2) if n * k < 8 << 20 else (2, 2) if k > 8192 else (2, 4)
    elif k > 8192:
        warps, rows = 4, 4
    elif n * k < 8 << 20 or (n <= 2048 and k <= 4096 and not adapted):
        warps, rows = 4, 2
    elif n * k < 20 << 20:
        warps, rows = (4, 4) if adapted else (8, 2)
    elif k <= 2048 and n <= 16384 and not adapted and not gated:
        warps, rows = 4, 4  # short rows: so few programs that they start early
    else:
        # Larger programs do not wait for an adapter's products, which take longer than a small program's weights.
        warps, rows = 8, 4 if adapted and gated else 1
    warps = min(warps, fit)
    # A gated program reads as many up rows as gate rows.
    return GemvConfig("rows", max(1, rows // 2) if gated else rows, warps * 256, warps, 1)
