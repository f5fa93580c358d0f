"""`Ops`: all operations of a decoder. Here are those on the residual stream; the others by kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from penstock.engine.backends.interface.activations import ActivationOps
from penstock.engine.backends.interface.attention import AttentionOps
from penstock.engine.backends.interface.block_index import BlockIndexOps
from penstock.engine.backends.interface.compression import CompressionOps
from penstock.engine.backends.interface.indexer import IndexOps
from penstock.engine.backends.interface.links import Link
from penstock.engine.backends.interface.pooled_index import PooledIndexOps
from penstock.engine.backends.interface.recurrence import RecurrentOps
from penstock.engine.backends.interface.sampling import SamplingOps
from penstock.engine.backends.interface.sparse_blocks import SparseBlockOps


class LinkedProducts(Protocol):
    """Products of one token in one launch."""

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor | None:
        """See `apply_links`."""
        ...


class Ops(
    ActivationOps,
    AttentionOps,
    BlockIndexOps,
    CompressionOps,
    IndexOps,
    PooledIndexOps,
    RecurrentOps,
    SamplingOps,
    SparseBlockOps,
    Protocol,
):
    """Device operations of a decoder. All may write into their inputs where the text says so."""

    wide_stream: bool
    """Whether the residual stream is kept in float32 whatever the activations are: it is added to twice a layer, and
    every addition in 16 bits would round away a part of what the layers before it said."""
    batch_invariant: bool
    """Whether a sequence's results may not depend on what else is in the step; set for deterministic mode."""

    def widen(self, x: Tensor) -> Tensor:
        """`x` [T, hidden] in float32; a new tensor."""
        ...

    def sigmoid(self, x: Tensor) -> Tensor:
        """Of every number of `x` [T, n]; a new tensor."""
        ...

    def sqrt_softplus(self, x: Tensor) -> Tensor:
        """Likewise: sqrt(log(1 + exp(x)))."""
        ...

    def store_rows(self, x: Tensor, table: Tensor, at: Tensor | None = None) -> None:
        """Write the rows of `x` [T, n] to rows `at` (int64 [T]) of `table` [rows, n], or to its first; in its dtype."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype | None = None) -> Tensor: ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, x_weight: Tensor | None = None
    ) -> Tensor: ...

    def centre(self, residual: Tensor, *added: Tensor) -> None:
        """Add one or two tensors, or nothing, to the residual stream, and subtract the mean of every row, in place. An
        RMS norm behind it is a LayerNorm."""
        ...

    def add_row(self, x: Tensor, row: Tensor) -> None:
        """Add `row` [n] to every row of `x` [T, n], in place: the bias of a norm."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...

    def gelu_mul(self, gate_up: Tensor) -> Tensor: ...

    def clamped_swiglu(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor: ...

    def bounded_silu(self, gate_up: Tensor, limit: float) -> Tensor: ...

    def chain(self, links: Sequence[Link]) -> LinkedProducts | None:
        """What computes these products of one token in one launch; None where there is no kernel for it. Its programs
        wait for each other: no other launch of this kind may be on the device at the same time."""
        ...
