"""Operations of mixers other than softmax attention, in plain torch: what backends without kernels for them use."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.interface import (
    AttentionBatch,
    DeltaLayout,
    DeltaWeights,
    HeadLayout,
    HeadScales,
    LatentAdditions,
    LatentLayout,
    LatentWeights,
    MambaLayout,
    MambaWeights,
    ShortConvWeights,
)
from penstock.engine.backends.reference import delta, latent, mamba, short_conv
from penstock.engine.backends.reference.block_index import PlainBlockIndexing
from penstock.engine.backends.reference.compressed import PlainCompression
from penstock.engine.backends.reference.indexer import PlainIndexing
from penstock.engine.backends.reference.pooled_index import PlainPooledIndexing
from penstock.engine.backends.reference.sparse_blocks import PlainSparseBlocks
from penstock.engine.backends.reference.values import by_heads, pad_values, scale_heads


class PlainMixers(PlainIndexing, PlainBlockIndexing, PlainCompression, PlainPooledIndexing, PlainSparseBlocks):
    """See `Ops`."""

    def latent_attention(
        self,
        q: Tensor,
        kv: Tensor | None,
        layout: LatentLayout,
        weights: LatentWeights,
        cos_sin: Tensor,
        batch: AttentionBatch,
        cache: Tensor,
        scales: Tensor | None = None,
        added: LatentAdditions | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return latent.latent_attention(
            q, kv, layout, weights, cos_sin, batch, cache, scales, added, sinks, alone=self.batch_invariant
        )

    def scale_heads(self, queries: Tensor, positions: Tensor, scales: HeadScales) -> Tensor:
        return scale_heads(queries, positions, scales)

    def split_gate(self, qkv: Tensor, layout: HeadLayout) -> tuple[Tensor, Tensor]:
        return delta.split_gate(qkv, layout)

    def pad_values(self, qkv: Tensor, layout: HeadLayout, value_dim: int, scale: float) -> Tensor:
        return pad_values(qkv, layout, value_dim, scale)

    def sigmoid(self, x: Tensor) -> Tensor:
        return x.sigmoid()

    def sqrt_softplus(self, x: Tensor) -> Tensor:
        return F.softplus(x).sqrt()

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        return by_heads(x, gate.sigmoid())

    def softplus_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        return (x.view(*gate.shape, -1) * F.softplus(gate.float()).to(x.dtype).unsqueeze(-1)).view(x.shape)

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
        return delta.delta_net(projected, gates, layout, weights, batch, conv_cache, state_cache)

    def mamba(
        self,
        projected: Tensor,
        layout: MambaLayout,
        weights: MambaWeights,
        batch: AttentionBatch,
        conv_cache: Tensor,
        state_cache: Tensor,
    ) -> Tensor:
        return mamba.mamba(projected, layout, weights, batch, conv_cache, state_cache)

    def short_conv(
        self, projected: Tensor, weights: ShortConvWeights, batch: AttentionBatch, conv_cache: Tensor
    ) -> Tensor:
        return short_conv.short_conv(projected, weights, batch, conv_cache)
