"""The shape of a decoder. `families.read_config` reads it from a checkpoint's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from penstock.engine.models.attention_config import (
    BlockIndexConfig,
    CompressionConfig,
    LatentConfig,
    QueryGrowth,
    SparseBlockConfig,
)
from penstock.engine.models.moe_config import MoeConfig
from penstock.engine.models.recurrence_config import DeltaConfig, MambaConfig, ShortConvConfig
from penstock.engine.models.rope import NO_ROPE, RopeConfig
from penstock.engine.models.stage_config import StageConfig

if TYPE_CHECKING:
    from penstock.engine.backends.interface import Activation

Shared = Literal["", "values", "both"]
LayerPart = Literal["mixer", "feed_forward"]


@dataclass(frozen=True, slots=True)
class StreamsConfig:
    """Several residual streams, mixed before and behind every part of a layer (hyper-connections)."""

    count: int
    rounds: int = 0
    """How often rows and columns of a mixing matrix are scaled to sum to one; 0: streams are not mixed."""
    eps: float = 0.0
    rank: int = 0
    """Of the gates that streams are read through; 0: they are added up with one weight each."""
    magnitude: float = 2.0
    """The largest factor of what is added to a stream."""
    eps_added: bool = False
    """Whether `eps` is in that factor too."""
    averaged: bool = False
    """Whether the streams' plain mean leaves the last layer, not a sum whose weights are computed."""


@dataclass(frozen=True, slots=True)
class NgramConfig:
    """N-gram embeddings: see `layers.ngrams`."""

    layers: tuple[int | None, ...]
    """Of each layer, which of those with n-grams it is; None: it has none."""
    size: int
    """Tokens of the longest n-gram."""
    heads: int
    """Of n-grams of each length."""
    width: int
    """Numbers that a layer is told of a token, by all heads."""
    rows: int
    """Rows of the table that a head has at least."""
    multiple: int
    """What the rows of all heads are filled up to a multiple of."""
    seed: int
    end: int
    """The id of the token that ends a text."""
    taps: int
    """Of the convolution."""
    parts: int
    """Tensors that a checkpoint may have in place of one table."""

    @property
    def before(self) -> int:
        """Tokens before each that belong to its n-grams."""
        return self.size - 1

    @property
    def reach(self) -> int:
        """Tokens before each that its convolution sees."""
        return (self.taps - 1) * self.size

    @property
    def all_heads(self) -> int:
        return self.before * self.heads


@dataclass(frozen=True, slots=True)
class CyclesConfig:
    """Two stacks of layers that run in turn, several times for each token."""

    layers: int
    """Of each stack."""
    upper: int
    """How often the upper stack runs."""
    lower: int
    """How often the lower one does before each of these."""

    @property
    def total(self) -> int:
        """Runs of layers, each with keys and values of its own."""
        return self.layers * self.upper * (self.lower + 1)

    def layer_of(self, run: int) -> int:
        """The layer that runs, of those of the lower stack and then those of the upper one."""
        turn, layer = divmod(run, self.layers)
        return layer if turn % (self.lower + 1) < self.lower else self.layers + layer


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """What every layer is told of a token itself: a vector of each layer's own, from a table and from the embedding."""

    size: int
    """Of one layer's."""
    vocab: int
    """Rows of the table."""
    layers: int
    """Of the whole model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything the decoder needs to know about its shape. The defaults are those of Llama."""

    family: str
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layer_heads: tuple[tuple[int, int], ...] = ()
    """Number of KV heads and size of a head of each layer, where layers differ in them; empty: those above."""
    query_heads: tuple[int, ...] = ()
    """Number of query heads of each layer, where layers differ in it; empty: `num_heads`, which is the most of them
    otherwise. All are a multiple of the layer's KV heads."""
    query_kinds: tuple[int, ...] = ()
    """The numbers among these in the whole model, each once, where this is a part of it; empty: those here."""
    mtp_like: int | None = None
    """A layer with the heads, window and rotary embedding of the first one for multi-token prediction; None: it sees
    everything, and its heads are those of all layers."""
    mtp_before_norm: bool = False
    """Whether that layer reads the residual stream as the last layer leaves it, and passes on its own like that; else
    both are normalized."""
    key_sources: tuple[int, ...] = ()
    """The layer whose keys and values each layer attends to; empty: its own, everywhere."""
    keys_as_values: bool = False
    """Whether in layers that see everything values are keys as they are projected."""
    normed_values: bool = False
    """Whether each head of values is normalized, without weights."""
    value_dim: int = 0
    """Size of a head of values, where it is smaller than that of a query (with `layer_heads`); 0: the same. The cache
    has that of queries."""
    value_scale: float = 1.0
    """Factor of the values."""
    ffn_sizes: tuple[int, ...] = ()
    """Width of each layer's dense feed-forward, where layers differ in it; empty: `ffn_size`."""
    ffn_kinds: tuple[int, ...] = ()
    """The widths among these in the whole model, each once, where this is a part of it; empty: those here."""
    token_inputs: TokenInputs | None = None
    stage: StageConfig | None = None
    vocab_size: int
    max_positions: int
    rms_eps: float
    rope: RopeConfig
    local_rope: RopeConfig | None = None
    """Of layers with a sliding window, where it is not that of the others; of those that have the window alone."""
    windows: tuple[int | None, ...]
    """Sliding window of each layer; None where a layer sees everything."""
    chunked: bool = False
    """Whether the windows are chunks: positions are cut every so many, and a token sees those of its own chunk."""
    layer_ropes: tuple[RopeConfig, ...] = ()
    """Rotary embedding of each layer, where they have their own."""
    unrotated: tuple[bool, ...] = ()
    """Which layers have no rotary embedding; empty: none."""
    query_growth: QueryGrowth | None = None
    """Of layers without rotary embedding."""
    learned_frequencies: bool = False
    """Whether every rotary frequency has a stored factor: e to the power of a number."""
    interleaved_rope: bool = False
    """Whether rotation pairs neighbouring dimensions, instead of those half of the rotated ones apart."""
    tied_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether each head of queries and keys is normalized."""
    unweighted_qk_norm: bool = False
    """Whether that is so in layers with rotary embedding, and without weights."""
    plain_qk_norm: bool = False
    """Whether each head of queries and keys is normalized in all layers, without weights."""
    rotated_qk_norm: bool = False
    """Whether each head of queries and keys is normalized behind the rotation, not before it."""
    qk_layer_norm: bool = False
    """Whether that is a LayerNorm with weights of its own for every head."""
    biased_qk_norm: bool = False
    """Whether each head of queries and keys has a LayerNorm with weights and biases, the same for all heads."""
    row_norms: bool = False
    """Whether all queries of a token are normalized together instead, and all its keys."""
    activation: Activation = "silu"
    bounds: tuple[float, ...] = ()
    """The same as of experts, of dense feed-forwards and of the expert that all tokens visit."""
    mlp_scales: tuple[float, float] = (1.0, 1.0)
    """Factors of what a dense feed-forward's gate matrix gives, and of what the feed-forward gives."""
    moe: MoeConfig | None = None
    delta: DeltaConfig | None = None
    mamba: MambaConfig | None = None
    short_conv: ShortConvConfig | None = None
    only: tuple[LayerPart, ...] = ()
    """The one part that each layer has; empty: every layer has both."""
    gated_attention: bool = False
    """Whether the query projection also gives a gate for each head's output."""
    output_gate: bool = False
    """Whether a matrix of its own gives such a gate."""
    gates_by_head: bool = False
    """Whether that is one number for all of a head's output."""
    softplus_gates: bool = False
    """Whether outputs are multiplied by the softplus of such gates, not by their sigmoid."""
    normed_outputs: bool = False
    """Whether what each head gives is normalized before its gate, without weights."""
    sandwich_norms: bool = False
    """Whether the output of attention and feed-forward is normalized too, before it is added to the residual stream."""
    out_norm_scale: float = 1.0
    """Factor of what these give."""
    out_norm_eps: float | None = None
    """Epsilon of these norms, and of those behind experts; None: that of the others."""
    residual_temperature: float | None = None
    """Of the gates that weigh the residual stream and what is added to it; None: there are none. See `models.muse`."""
    norm_offset: float = 0.0
    """Added to norm weights when they are read."""
    final_norm_offset: float = 0.0
    """The same of the norm behind the last layer."""
    embedding_scale: float = 1.0
    normed_embedding: bool = False
    """Whether the embedding of a token is normalized, without weights. A head that is the embedding has its rows as
    they are stored."""
    virtual_scale: float | None = 1.0
    """What inputs are multiplied by that are no rows of the embedding: some families scale whatever comes in. None:
    tokens are not scaled either where such inputs are given, so that they cannot stand beside tokens."""
    attention_scale: float
    """Factor of the products of queries and keys."""
    attention_softcap: float | None = None
    """Scores s become cap * tanh(s / cap) before the softmax."""
    attention_sinks: bool = False
    """Whether every head has a score of its own in its softmax that stands for no key."""
    window_sinks: bool = False
    """Whether that is so in layers with a window alone."""
    logit_softcap: float | None = None
    latent: LatentConfig | None = None
    compression: CompressionConfig | None = None
    streams: StreamsConfig | None = None
    block_index: BlockIndexConfig | None = None
    sparse_blocks: SparseBlockConfig | None = None
    ngrams: NgramConfig | None = None
    cycles: CyclesConfig | None = None
    """Where layers run several times: the model has as many layers as there are runs."""
    logit_scale: float = 1.0
    """Factor of the logits, before they are capped."""
    parallel: bool = False
    """Whether attention and feed-forward of a layer read the same stream, and both are added to it."""
    by_transformers: bool = False
    """Whether no family describes the model, so that the `transformers` library runs its layers."""

    layer_norms: bool = False
    """Whether what normalizes the residual stream are LayerNorms."""
    norm_bias: bool = False
    """Whether these have biases."""
    own_norms: bool = False
    """With `parallel`: whether the feed-forward has a norm of its own."""
    head_bias: bool = False
    clip_qkv: float | None = None
    """Queries, keys and values lie within +- this."""

    def heads_in(self, layer: int) -> tuple[int, int]:
        """Number of KV heads, and size of a head."""
        return self.layer_heads[layer] if self.layer_heads else (self.num_kv_heads, self.head_dim)

    def queries_in(self, layer: int) -> int:
        """Number of query heads."""
        return self.query_heads[layer] if self.query_heads else self.num_heads

    @property
    def heads_differ(self) -> bool:
        """Whether layers have heads of another number or size than others."""
        return bool(self.layer_heads or self.query_heads)

    def gates_in(self, layer: int) -> int:
        """Numbers that the matrix of gates gives."""
        return self.queries_in(layer) * (1 if self.gates_by_head else self.heads_in(layer)[1])

    def values_in(self, layer: int) -> int:
        """Numbers that a layer projects as values."""
        kv_heads, dim = self.heads_in(layer)
        return kv_heads * (self.value_dim or dim)

    def attended_in(self, layer: int) -> int:
        """Numbers that a layer's heads give."""
        return self.queries_in(layer) * (self.value_dim or self.heads_in(layer)[1])

    def bound_in(self, layer: int) -> float:
        """See `bounds`."""
        return self.bounds[layer] if self.bounds else 0.0

    def has_sinks(self, layer: int) -> bool:
        return self.attention_sinks and not (self.window_sinks and self.windows[layer] is None)

    def ffn_in(self, layer: int) -> int:
        """Width of the layer's dense feed-forward."""
        return self.ffn_sizes[layer] if self.ffn_sizes else self.ffn_size

    def source_of(self, layer: int) -> int:
        """The layer whose keys and values a layer attends to."""
        return self.key_sources[layer] if self.key_sources else layer

    def given_to(self, layer: int) -> int | None:
        """See `StageConfig.given`."""
        return None if self.stage is None else self.stage.given[layer]

    def shares(self, layer: int) -> Shared:
        """See `HeadLayout.shared`."""
        if self.source_of(layer) != layer:
            return "both"
        return "values" if self.keys_as_values and self.windows[layer] is None else ""

    def projects(self, layer: int) -> Shared:
        """The same of the matrices that a layer has: it may store keys that another stage has projected."""
        return "both" if self.given_to(layer) is not None else self.shares(layer)

    def rotary_dim(self, layer: int) -> int:
        """What a layer's rotary table is made for."""
        return self.heads_in(layer)[1] if self.latent is None else self.latent.rotary_in(layer)

    @property
    def other_tables(self) -> bool:
        """Whether tokens are looked up in other tables than the embedding, too."""
        return self.token_inputs is not None or (self.moe is not None and any(self.moe.hashed))

    @property
    def one_norm(self) -> bool:
        """Whether a layer has one norm before both its parts."""
        return self.parallel and not self.own_norms

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """Rotary embedding of each layer."""
        if self.layer_ropes:
            return self.layer_ropes
        if self.compression is not None:
            return tuple(self.rope if rate else self.local_rope or self.rope for rate in self.compression.rates)
        ropes = tuple(self.rope if window is None else self.local_rope or self.rope for window in self.windows)
        if not self.unrotated:
            return ropes
        return tuple(NO_ROPE if plain else rope for plain, rope in zip(self.unrotated, ropes, strict=True))

    @property
    def recurrent(self) -> bool:
        """Whether some layer of the model keeps a state, perhaps one that another process has."""
        pooled = self.latent is not None and self.latent.pooled
        windows = self.compression is not None and not self.compression.paged_window
        return pooled or windows or any(part is not None for part in (self.delta, self.mamba, self.short_conv))

    @property
    def stage_starts(self) -> tuple[bool, ...]:
        """With which layers a stage of a pipeline may begin; empty: with any. Those that attend to what another one has
        chosen stay with it, as do those that attend to its latents."""
        latent = self.latent
        if latent is None or latent.index is None:
            return ()
        sources = latent.sources or range(self.num_layers)
        recurrent = (False,) * self.num_layers if self.delta is None else self.delta.layers
        starts = (own or other for own, other in zip(latent.index.layers, recurrent, strict=True))
        return tuple(may and min(sources[at:]) >= at for at, may in enumerate(starts))

    @property
    def plain_layers(self) -> bool:
        """Whether every layer is norm, attention, norm, SiLU-gated feed-forward, and nothing else."""
        plain = self.moe is None and not self.recurrent and not self.gated_attention
        return plain and self.activation == "silu" and self.plain_outlines

    @property
    def plain_outlines(self) -> bool:
        """The same, but that mixers may be of any kind, and feed-forwards of experts or with another gate."""
        indexed = self.latent is not None and self.latent.index is not None
        outside = (
            self.cycles is not None or self.parallel or self.layer_norms or self.output_gate or self.streams is not None
        )
        indexed = indexed or self.sparse_blocks is not None
        return not outside and not self.only and not self.sandwich_norms and not indexed
