"""`TritonOps`: the decoder's operations on one CUDA device.

Every call launches kernels and returns; nothing waits for the device, and every grid depends on host values only, so
any sequence of calls can be captured in a CUDA graph and replayed with new contents of the same tensors. One
`TritonOps` belongs to one stream.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from penstock.engine.backends.cuda.chains import Chains
from penstock.engine.backends.cuda.kernels import (
    activation,
    decode,
    delta,
    filters,
    head_gate,
    mamba,
    masks,
    norm,
    prefill,
    rope,
    row_norm,
    sampler,
    short_conv,
)
from penstock.engine.backends.cuda.kernels.addends import Addends, Summands
from penstock.engine.backends.cuda.kernels.product_chain import ProductChain
from penstock.engine.backends.cuda.latents import INVARIANT_ROWS, LatentOps
from penstock.engine.backends.interface import (
    AttentionBatch,
    DeltaLayout,
    DeltaWeights,
    HeadLayout,
    KeySmoothing,
    Link,
    LinkedProducts,
    MambaLayout,
    MambaWeights,
    OverRanks,
    Pointwise,
    ShortConvWeights,
)
from penstock.engine.backends.reference.block_index import PlainBlockIndexing
from penstock.engine.backends.reference.compressed import PlainCompression
from penstock.engine.backends.reference.pooled_index import PlainPooledIndexing
from penstock.engine.backends.reference.sparse_blocks import PlainSparseBlocks
from penstock.engine.backends.reference.values import pad_values

log = logging.getLogger(__name__)


class TritonOps(LatentOps, PlainBlockIndexing, PlainCompression, PlainPooledIndexing, PlainSparseBlocks):
    """See `Ops`."""

    wide_stream = False
    samples_any_dtype = True

    def __init__(self, device: torch.device, *, pdl: bool = False) -> None:
        self.device = device
        self.pdl = pdl
        """Programmatic dependent launch: hides most of the gap between small kernels (Hopper and later)."""
        if device.type == "cuda":
            self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        else:
            self.processors = 132
        self.batch_invariant = False
        """One launch shape for any number of sequences; see `Ops`."""
        self._chains = Chains(device, ProductChain)
        self.hopper_prefill = _load_hopper_prefill(device)
        self.fp8_attention = False
        """Whether long prompts over an FP8 cache attend in FP8."""
        self._counters = torch.zeros(65536, dtype=torch.int32, device=device)

    def widen(self, x: Tensor) -> Tensor:
        return x.float()

    def store_rows(self, x: Tensor, table: Tensor, at: Tensor | None = None) -> None:
        if at is None:
            table[: len(x)] = x
        else:
            table[at] = x.to(table.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype | None = None) -> Tensor:
        return norm.rms_norm(x, weight, eps, dtype=dtype, pdl=self.pdl)

    def add_rms_norm(
        self,
        x: Tensor | Addends | Summands,
        residual: Tensor,
        weight: Tensor | None,
        eps: float,
        x_weight: Tensor | None = None,
    ) -> Tensor:
        return norm.add_rms_norm(x, residual, weight, eps, x_weight, pdl=self.pdl)

    def centre(self, residual: Tensor, *added: Tensor | Addends) -> None:
        norm.centre(residual, added, pdl=self.pdl)

    def pointwise(self, x: Tensor | Addends, function: Pointwise) -> Tensor:
        return activation.pointwise(x, function, pdl=self.pdl)

    def add_row(self, x: Tensor, row: Tensor) -> None:
        x.add_(row)

    def silu_mul(self, gate_up: Tensor | Addends) -> Tensor:
        return activation.silu_mul(gate_up, pdl=self.pdl)

    def gelu_mul(self, gate_up: Tensor | Addends) -> Tensor:
        return activation.gelu_mul(gate_up, pdl=self.pdl)

    def clamped_swiglu(self, gate_up: Tensor | Addends, alpha: float, limit: float) -> Tensor:
        return activation.clamped_swiglu(gate_up, alpha, limit, pdl=self.pdl)

    def bounded_silu(self, gate_up: Tensor | Addends, limit: float) -> Tensor:
        return activation.bounded_silu(gate_up, limit, pdl=self.pdl)

    def chain(self, links: Sequence[Link]) -> LinkedProducts | None:
        return None if self.batch_invariant else self._chains.of(links)

    def norm_rows(
        self,
        qkv: Tensor | Addends,
        layout: HeadLayout,
        q_norm: Tensor,
        k_norm: Tensor,
        eps: float,
        over_ranks: OverRanks | None,
    ) -> Tensor:
        return row_norm.norm_rows(qkv, layout, q_norm, k_norm, eps, over_ranks, pdl=self.pdl)

    def rope_and_cache(
        self,
        qkv: Tensor | Addends,
        layout: HeadLayout,
        cos_sin: Tensor,
        batch: AttentionBatch,
        k_cache: Tensor,
        v_cache: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        kv_scales: tuple[Tensor, Tensor] | None = None,
        key_smoothing: KeySmoothing | None = None,
    ) -> Tensor:
        return rope.rope_and_cache(
            qkv, layout, cos_sin, batch, k_cache, v_cache, q_norm, k_norm, eps, kv_scales, key_smoothing, pdl=self.pdl
        )

    def attention(
        self,
        q: Tensor,
        layout: HeadLayout,
        batch: AttentionBatch,
        k_cache: Tensor,
        v_cache: Tensor,
        kv_scales: tuple[Tensor, Tensor] | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        out = torch.empty((q.shape[0], layout.heads * layout.head_dim), dtype=q.dtype, device=q.device)
        group = layout.heads // layout.kv_heads
        if self.batch_invariant and batch.num_decodes == q.shape[0]:  # steps always are; warm-up measures prompts too
            self._attend_invariant(q, layout, batch, k_cache, v_cache, out, kv_scales, sinks)
            return out
        if batch.num_decodes:
            shape = decode.choose(
                batch.num_decodes, layout.kv_heads, layout.head_dim, k_cache.element_size(), self.processors
            )
            counters = self._counters_for(batch.num_decodes * layout.kv_heads)
            decode.decode_attention(
                q, layout, batch, k_cache, v_cache, out, counters, shape, kv_scales, sinks, pdl=self.pdl
            )
        if batch.context_lens.shape[0] > batch.num_decodes:
            hopper = self.hopper_prefill if sinks is None else None
            if hopper is not None and hopper.applies(layout, batch, q, k_cache):
                hopper.prefill_attention(q, layout, batch, k_cache, v_cache, out, kv_scales, self.fp8_attention)
                return out
            tile = prefill.choose(batch.max_query, batch.max_context, group, layout.head_dim, q.element_size())
            prefill.prefill_attention(q, layout, batch, k_cache, v_cache, out, tile, kv_scales, sinks, pdl=self.pdl)
        return out

    def gathered_bytes(self, layout: HeadLayout, dtype: torch.dtype) -> int:
        """See `long_prompts`."""
        hopper = self.hopper_prefill
        return 0 if hopper is None or self.batch_invariant else hopper.gathered_bytes(layout, dtype)

    def _attend_invariant(
        self,
        q: Tensor,
        layout: HeadLayout,
        batch: AttentionBatch,
        k_cache: Tensor,
        v_cache: Tensor,
        out: Tensor,
        kv_scales: tuple[Tensor, Tensor] | None,
        sinks: Tensor | None,
    ) -> None:
        """Every token decodes; how its keys are split among programs depends on its own context alone."""
        shape = decode.fixed(layout.head_dim, k_cache.element_size())
        for begin in range(0, q.shape[0], INVARIANT_ROWS):
            part = slice(begin, begin + INVARIANT_ROWS)
            count = min(INVARIANT_ROWS, q.shape[0] - begin)
            few = dataclasses.replace(
                batch, rows=batch.rows[part], context_lens=batch.context_lens[part], num_decodes=count
            )
            counters = self._counters_for(count * layout.kv_heads)
            decode.decode_attention(
                q[part], layout, few, k_cache, v_cache, out[part], counters, shape, kv_scales, sinks, pdl=self.pdl
            )

    def split_gate(self, qkv: Tensor | Addends, layout: HeadLayout) -> tuple[Any, Tensor]:
        if isinstance(qkv, Addends):
            qkv = qkv.base + torch.where(qkv.ranks.unsqueeze(1) > 0, qkv.delta, 0)
        return head_gate.split(qkv, layout)

    def pad_values(self, qkv: Tensor | Addends, layout: HeadLayout, value_dim: int, scale: float) -> Tensor:
        if isinstance(qkv, Addends):
            qkv = qkv.base + torch.where(qkv.ranks.unsqueeze(1) > 0, qkv.delta, 0)
        return pad_values(qkv, layout, value_dim, scale)

    def sigmoid(self, x: Tensor) -> Tensor:
        return x.sigmoid()

    def sqrt_softplus(self, x: Tensor) -> Tensor:
        return torch.nn.functional.softplus(x).sqrt()

    def sigmoid_mul(self, x: Tensor, gate: Tensor | Addends) -> Tensor:
        if isinstance(gate, Addends):
            gate = gate.base + torch.where((gate.ranks > 0).unsqueeze(1), gate.delta, 0)
        if gate.dim() == 2:
            wide = gate.shape[1] == x.shape[1]
            gate = gate.unsqueeze(1) if wide else gate.unsqueeze(2).expand(-1, -1, x.shape[1] // gate.shape[1])
        return head_gate.sigmoid_mul(x, gate, pdl=self.pdl)

    def softplus_mul(self, x: Tensor, gate: Tensor | Addends) -> Tensor:
        if isinstance(gate, Addends):
            gate = gate.base + torch.where((gate.ranks > 0).unsqueeze(1), gate.delta, 0)
        return head_gate.softplus_mul(x, gate, pdl=self.pdl)

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
        return delta.delta_net(
            projected,
            gates,
            layout,
            weights,
            batch,
            conv_cache,
            state_cache,
            self._counters,
            processors=self.processors,
            fixed=self.batch_invariant,
            pdl=self.pdl,
        )

    def mamba(
        self,
        projected: Tensor | Addends,
        layout: MambaLayout,
        weights: MambaWeights,
        batch: AttentionBatch,
        conv_cache: Tensor,
        state_cache: Tensor,
    ) -> Tensor:
        if isinstance(projected, Addends):
            projected = projected.base + torch.where(projected.ranks.unsqueeze(1) > 0, projected.delta, 0)
        return mamba.mamba(
            projected,
            layout,
            weights,
            batch,
            conv_cache,
            state_cache,
            processors=1 if self.batch_invariant else self.processors,
            in_place_runs=self.batch_invariant,
            pdl=self.pdl,
        )

    def short_conv(
        self, projected: Tensor | Addends, weights: ShortConvWeights, batch: AttentionBatch, conv_cache: Tensor
    ) -> Tensor:
        if isinstance(projected, Addends):
            projected = projected.base + torch.where(projected.ranks.unsqueeze(1) > 0, projected.delta, 0)
        return short_conv.short_conv(projected, weights, batch, conv_cache, pdl=self.pdl)

    def mask_logits(self, logits: Tensor, at: Tensor, bits: Tensor) -> None:
        masks.mask_logits(logits, at, bits, pdl=self.pdl)

    def argmax(self, logits: Tensor) -> Tensor:
        return sampler.argmax(logits, pdl=self.pdl)

    def gumbel_argmax(
        self, logits: Tensor, temperatures: Tensor, keys: Tensor, thresholds: Tensor | None = None
    ) -> Tensor:
        return sampler.gumbel_argmax(logits, temperatures, keys, thresholds, pdl=self.pdl)

    def filter_thresholds(
        self, logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
    ) -> Tensor:
        """Thresholds for `gumbel_argmax` that apply top-k, top-p and min-p; no sort, no sync."""
        return filters.thresholds(logits, temperatures, top_k, top_p, min_p, pdl=self.pdl)

    def _counters_for(self, programs: int) -> Tensor:
        """Zeroed arrival counters. Kept for good once made: a captured graph holds their address."""
        if programs > self._counters.numel():
            raise ValueError(
                f"{programs} sequences x kv heads decode in one step, more than the {self._counters.numel()} "
                "arrival counters; lower max_running"
            )
        return self._counters


def _load_hopper_prefill(device: torch.device) -> ModuleType | None:
    """Attention of long chunks on Hopper, where the installed Triton has the experimental dialect it is written in."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    try:
        from penstock.engine.backends.cuda.kernels import hopper_prefill
    except ImportError as error:
        log.warning("long prompts use the portable attention kernel, because this Triton lacks Gluon: %s", error)
        return None
    return hopper_prefill
