"""Sampling primitives over logits on the native CPU library."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.backends.cpu.layout import LayoutError, need, need_contiguous
from penstock.engine.backends.cpu.native_ops import NativeOps
from penstock.engine.backends.reference import filters


class SamplingOps(NativeOps):
    """See `Ops`."""

    def mask_logits(self, logits: Tensor, at: Tensor, bits: Tensor) -> None:
        need(logits, "logits", torch.float32)
        need(at, "at", torch.int64)
        need(bits, "bits", torch.int32)
        if bits.shape != (at.shape[0], -(-logits.shape[1] // 32)):
            raise LayoutError(f"bits of shape {tuple(bits.shape)} do not fit logits of shape {tuple(logits.shape)}")
        self._lib.pk_mask_logits(
            self._ctx, logits.data_ptr(), at.data_ptr(), bits.data_ptr(), at.shape[0], logits.shape[1]
        )

    def argmax(self, logits: Tensor) -> Tensor:
        """int64 [rows]: the largest entry of each float32 row (the first of equals)."""
        need(logits, "logits", torch.float32)
        out = torch.empty(logits.shape[0], dtype=torch.int64)
        self._lib.pk_argmax(self._ctx, logits.data_ptr(), out.data_ptr(), *logits.shape)
        return out

    def logsumexp(self, logits: Tensor) -> Tensor:
        """float32 [rows]: log of the sum of exponentials of each float32 row."""
        need(logits, "logits", torch.float32)
        out = torch.empty(logits.shape[0], dtype=torch.float32)
        self._lib.pk_logsumexp(self._ctx, logits.data_ptr(), out.data_ptr(), *logits.shape)
        return out

    def filter_thresholds(
        self, logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
    ) -> Tensor:
        return filters.thresholds(logits, temperatures, top_k, top_p, min_p)

    def gumbel_argmax(
        self, logits: Tensor, temperatures: Tensor, keys: Tensor, thresholds: Tensor | None = None
    ) -> Tensor:
        """int64 [rows]: a draw from softmax(logits / temperature) that depends only on the row and its key.

        `keys` is int64 (read as unsigned) or uint64 [rows]; `temperatures` float32 [rows], zero meaning greedy.
        The noise is defined in csrc/elementwise/gumbel.h.
        """
        need(logits, "logits", torch.float32)
        need(temperatures, "temperatures", torch.float32)
        if keys.dtype not in (torch.int64, torch.uint64):
            raise LayoutError(f"keys must be int64 or uint64, got {keys.dtype}")
        need_contiguous(keys, "keys")
        if temperatures.shape[0] != logits.shape[0] or keys.shape[0] != logits.shape[0]:
            raise LayoutError("logits, temperatures and keys must have the same number of rows")
        if thresholds is not None:
            logits = filters.drop_below(logits, temperatures, thresholds)
        out = torch.empty(logits.shape[0], dtype=torch.int64)
        self._lib.pk_gumbel_argmax(
            self._ctx, logits.data_ptr(), temperatures.data_ptr(), keys.data_ptr(), out.data_ptr(), *logits.shape
        )
        return out
