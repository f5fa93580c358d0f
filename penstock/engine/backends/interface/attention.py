"""Attention over a paged cache: how projections split into heads, and the operations between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from penstock.engine.backends.interface.batch import AttentionBatch
from penstock.engine.backends.interface.dtypes import KeySmoothing, KVScales

OverRanks = Callable[[Tensor], Tensor]
"""The mean over all ranks, of which each calls it with a tensor of the same shape."""


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """How a fused query-key-value row splits into heads, and what is done to each head."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    """Sliding window: a token sees itself and the `window - 1` before it. None: everything before it."""
    chunked: bool = False
    """Positions are cut into chunks of `window` instead: a token sees those of its chunk up to itself."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap) before the softmax. None: they stay."""
    interleaved: bool = False
    """Rotation pairs dimension 2i with 2i + 1, instead of i with i + rotary / 2."""
    centred_norms: bool = False
    """The norms of queries and keys are LayerNorms with weights of their own for every head: [heads, head_dim]."""
    normed_values: bool = False
    """Each head of values is RMS-normalized, without weights."""
    shared: Literal["", "values", "both"] = ""
    """What a row has not: values, which are keys as they are projected, before any norm; or keys and values, which
    another layer has stored."""

    @property
    def rows(self) -> int:
        """Heads of all kinds in a row."""
        return self.heads + {"": 2, "values": 1, "both": 0}[self.shared] * self.kv_heads


@dataclass(frozen=True, slots=True)
class LatentLayout:
    """How queries split into heads where all heads share one latent key per token (MLA).

    A query head is `plain` dimensions and `rotary` rotated ones. What is cached of a token is its latent, of which
    every head's plain key and value are linear functions, and one rotated key for all heads.
    """

    heads: int
    latent: int
    plain: int
    rotary: int
    value: int
    scale: float
    interleaved: bool
    """Whether rotation pairs neighbouring dimensions; else dimension i with i + rotary / 2. What is rotated lies in
    halves in either case."""

    @property
    def query(self) -> int:
        """Dimensions of a query head."""
        return self.plain + self.rotary

    @property
    def cached(self) -> int:
        """Numbers that are cached of a token."""
        return self.latent + self.rotary


class LatentWeights(NamedTuple):
    """What stands between a token's projections and its attention."""

    norm: Tensor
    """Of latents: [latent]."""
    eps: float
    up: Tensor
    """[heads, plain + value, latent]: the rows that make a latent into a head's plain key, then into its value."""


class HeadScales(NamedTuple):
    """Factors of queries that grow with the logarithm of their position, each head at a rate of its own (SSMax):
    rates * log(position + 1) + offsets."""

    rates: Tensor
    offsets: Tensor
    """float32 [heads]."""
    logarithms: Tensor
    """float32 [positions]: of every position, counted from one."""


class LatentAdditions(Protocol):
    """What is added where latents are made into keys and values: the adapters of a step's tokens. In place, in this
    order; numbers of a row follow each other, and rows of a token lie equally far apart."""

    def scale(self, plain: Tensor) -> None:
        """Before anything is made of queries: [T, heads, plain]."""
        ...

    def queries(self, plain: Tensor, made: Tensor) -> None:
        """To queries in the space of latents [T, heads, latent], made of `plain` [T, heads, plain]."""
        ...

    def turn(self, seen: Tensor) -> None:
        """Before values are made of the latents that heads have seen: [T, heads, latent]."""
        ...

    def values(self, seen: Tensor, made: Tensor) -> None:
        """To outputs [T, heads, value], made of the latents that heads have seen: [T, heads, latent]."""
        ...


class AttentionOps(Protocol):
    """Of layers whose tokens see the keys of those before them."""

    def norm_rows(
        self, qkv: Tensor, layout: HeadLayout, q_norm: Tensor, k_norm: Tensor, eps: float, over_ranks: OverRanks | None
    ) -> Tensor:
        """The queries of each token RMS-normalized together, and its keys, in place; `qkv` as in `rope_and_cache`.

        `q_norm` is [heads * head_dim], `k_norm` [kv_heads * head_dim]. `over_ranks`: where other ranks have the other
        heads; takes mean squares float32 [T, 2] of this rank's queries and keys to those of all.
        """
        ...

    def rope_and_cache(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        cos_sin: Tensor,
        batch: AttentionBatch,
        k_cache: Tensor,
        v_cache: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        kv_scales: KVScales | None = None,
        key_smoothing: KeySmoothing | None = None,
    ) -> Tensor:
        """Rotate queries and keys, store keys and values, return the queries [T, heads, head_dim].

        `qkv` is [T, layout.rows * head_dim] and may be overwritten. `cos_sin` is float32
        [max_positions, rotary]: cosines in the first half of a row, sines in the second; rotation pairs
        dimension i with i + rotary / 2, and leaves those from `rotary` on as they are. With `q_norm`/`k_norm`
        each head is RMS-normalized first. `layout` may ask for other pairs and for LayerNorms. An FP8 cache stores
        keys and values divided by `kv_scales` and clamped to its range; an int8 cache stores them rounded, and
        writes `kv_scales`. `key_smoothing` is applied after the rotation, before keys are stored and queries returned.
        """
        ...

    def attention(
        self,
        q: Tensor,
        layout: HeadLayout,
        batch: AttentionBatch,
        k_cache: Tensor,
        v_cache: Tensor,
        kv_scales: KVScales | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of the new tokens over their sequences' cached keys: [T, heads * head_dim].

        `sinks`, float32 [heads]: a score of each head that takes part in its softmax and stands for no key.
        """
        ...

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
        """Causal attention over cached latents: [T, heads * value].

        `q` is [T, heads * (plain + rotary)], `kv` [T, latent + rotary]; their rows may lie apart. Without `kv` the
        cache knows the new tokens already, and nothing is stored. `rotary` may be 0. Latents are
        normalized, queries and keys rotated by `cos_sin` (see `rope_and_cache`), the new tokens stored in `cache`
        [num_blocks, block_size, latent + rotary]. `scales`: of an FP8 cache float32 [1], of an int8 cache
        `SCALE_DTYPE` [num_blocks, block_size], written with the tokens. With `added` `weights.up` is absorbed for all
        tokens. `sinks`: see `attention`.
        """
        ...

    def scale_heads(self, queries: Tensor, positions: Tensor, scales: HeadScales) -> Tensor:
        """`queries` [T, heads * n], whose rows may lie apart, times the factor of their head and position."""
        ...

    def split_gate(self, qkv: Tensor, layout: HeadLayout) -> tuple[Tensor, Tensor]:
        """Of gated attention: rows of query and gate of each head in turn, then keys and values, as rows without the
        gates, as `rope_and_cache` takes them, and the gates [T, heads * head_dim]."""
        ...

    def pad_values(self, qkv: Tensor, layout: HeadLayout, value_dim: int, scale: float) -> Tensor:
        """Rows whose heads of values have `value_dim` numbers as `rope_and_cache` takes them: values times `scale`,
        with zeros behind those of each head."""
        ...

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """`x` [T, heads * head_dim] times sigmoid of `gate`, which is as wide or has one number for each head; may
        overwrite `x`."""
        ...

    def softplus_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """`x` [T, n] times log(1 + exp(`gate`)), which has a number for each of `x`, or for each of equal runs of
        them: [T, g]; may overwrite `x`."""
        ...
