"""`Ops` on the native CPU library, plus the sampling primitives over logits.

Activations and cache may each be float32, float16 or bfloat16, the cache also int8 or FP8; arithmetic is float32.
Inputs must be contiguous: a wrong layout is refused (`layout`), never copied silently. Operations are in modules by
their kind; those of recurrent layers are here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.backends.cpu.attention_ops import AttentionOps
from penstock.engine.backends.cpu.elementwise_ops import ElementwiseOps
from penstock.engine.backends.cpu.layout import dtype_code, need, need_contiguous
from penstock.engine.backends.cpu.recorder import NotRecordableError
from penstock.engine.backends.cpu.sampling_ops import SamplingOps
from penstock.engine.backends.interface import (
    AttentionBatch,
    DeltaLayout,
    DeltaWeights,
    MambaLayout,
    MambaWeights,
    ShortConvWeights,
    StateBatch,
)
from penstock.engine.backends.reference import delta, mamba
from penstock.engine.backends.reference.single_tokens import one_by_one


class CpuOps(AttentionOps, ElementwiseOps, SamplingOps):
    """See `Ops`. One instance per engine: it owns the thread pool."""

    wide_stream = True
    samples_any_dtype = False

    def delta_net(
        self,
        projected: Tensor,
        gates: Tensor,
        layout: DeltaLayout,
        weights: DeltaWeights,
        batch: AttentionBatch,
        conv_cache: Tensor,
        state_cache: Tensor,
    ) -> Tensor:
        if batch.states is None:
            raise NotRecordableError("gated delta nets are not recorded")

        def layer(parts: list[Tensor], batch: AttentionBatch, conv: Tensor, state: Tensor) -> Tensor:
            return delta.delta_net(parts[0], parts[1], layout, weights, batch, conv, state, self._delta_step)

        if self.batch_invariant:
            return one_by_one(layer, [projected, gates], batch, conv_cache, state_cache)
        return layer([projected, gates], batch, conv_cache, state_cache)

    def _delta_step(self, heads: delta.Heads, at: Tensor, states: StateBatch, cache: Tensor, out: Tensor) -> None:
        """See `delta.Step`."""
        need(cache, "states", torch.float32)
        q, k, v, g, beta = (part[at].contiguous() for part in heads)
        decay, reads, writes = g.exp(), states.reads[at].long(), states.writes[at].long()
        mixed = torch.empty_like(v)
        tensors = (q, k, v, decay, beta, cache, reads, writes, mixed)
        self._lib.pk_delta_step(
            self._ctx,
            *(tensor.data_ptr() for tensor in tensors),
            len(at),
            q.shape[1],
            q.shape[2],
            v.shape[2],
            decay.shape[2],
        )
        out[at] = mixed

    def mamba(
        self,
        projected: Tensor,
        layout: MambaLayout,
        weights: MambaWeights,
        batch: AttentionBatch,
        conv_cache: Tensor,
        state_cache: Tensor,
    ) -> Tensor:
        if batch.states is None:
            raise NotRecordableError("Mamba layers are not recorded")

        def layer(parts: list[Tensor], batch: AttentionBatch, conv: Tensor, state: Tensor) -> Tensor:
            return mamba.mamba(parts[0], layout, weights, batch, conv, state)

        if self.batch_invariant:
            return one_by_one(layer, [projected], batch, conv_cache, state_cache)
        return layer([projected], batch, conv_cache, state_cache)

    def short_conv(
        self, projected: Tensor, weights: ShortConvWeights, batch: AttentionBatch, conv_cache: Tensor
    ) -> Tensor:
        states = batch.states
        assert states is not None, "a recurrent layer needs to know where its states are"
        need_contiguous(projected, "projected")
        need(conv_cache, "states", projected.dtype)
        need(batch.positions, "positions", torch.int64)
        for slots in (states.first, states.reads, states.writes):
            need(slots, "slots of states", torch.int32)
        (width, channels), rows = weights.taps.shape, len(projected)
        out = torch.empty((rows, channels), dtype=projected.dtype)
        tensors = (
            projected, weights.taps, weights.bias, batch.positions, states.first, states.reads, states.writes,
            conv_cache, out,
        )  # fmt: skip
        self._lib.pk_short_conv(
            self._ctx, *(tensor.data_ptr() for tensor in tensors), rows, channels, width,
            dtype_code(projected, "projected"),
        )  # fmt: skip
        return out
