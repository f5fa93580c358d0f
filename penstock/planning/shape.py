"""The shape of a model: its dimensions, how many parameters they make, and what a token leaves in the KV cache.

Everything is counted from dimensions alone, layer by layer, and this is the only place that counts them: memory, step
time and the benchmarks' bounds all ask here. `model_shape` finds the shape of a name or path.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from penstock.planning.compression import Compression
from penstock.planning.gated_streams import GatedStreams
from penstock.planning.numbers import WeightFormat
from penstock.planning.token_mixers import Delta, Mamba, Mla, ShortConv, SparseBlocks

_BLOCK = 16
"""Tokens of a block, as engines have it that say nothing else."""


@dataclass(frozen=True, slots=True)
class Moe:
    """A feed-forward of many experts, of which each token visits a few."""

    experts: int
    top_k: int
    ffn: int
    """Width of one expert."""
    layers: tuple[bool, ...]
    """Which layers have experts; the others are dense."""
    bias: bool
    """Whether routed experts have biases; `mlp_bias` of the model is for the shared ones."""
    shared_ffn: int = 0
    """Width of the experts that every token visits, all of them together."""
    shared_gate: bool = False
    """Whether a router of one output weighs the shared experts."""
    router_bias: bool = False
    """Whether a router has a bias per expert."""
    gate: bool = True
    """Whether experts have a gate, the shared one too."""
    latent: int = 0
    """Numbers of a token that experts read, between two matrices; 0: all of them."""
    normed: bool = False
    """Whether there is a norm behind the first of these matrices, and one behind every expert."""
    apart: bool = False
    """Whether they and the shared expert have norms of their own, and each a factor."""
    hashed: tuple[bool, ...] = ()
    """In which layers a table says which experts a token visits, and there is no bias."""

    @property
    def count(self) -> int:
        """Layers with experts."""
        return sum(self.layers)


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Parameters of one layer by how they are used, and split between devices."""

    query_output: int
    """Matrices that shards of a layer divide by query heads."""
    key_value: int
    """Matrices divided by KV heads; more shards than heads hold copies."""
    latent: int
    """Compressing matrices of latent attention: every shard has them whole."""
    feed_forward: int
    """Dense feed-forward and shared experts, divided by width."""
    experts: int
    """All routed experts, divided by width."""
    router: int
    small: int
    """Norms, biases, sinks: whole on every shard, never rounded."""

    @property
    def matrices(self) -> int:
        """What every token passes; routers included, routed experts not."""
        return self.query_output + self.key_value + self.latent + self.feed_forward + self.router

    @property
    def total(self) -> int:
        return self.matrices + self.experts + self.small


class LayerHeads(NamedTuple):
    """The keys and values of one layer."""

    kv_heads: int
    head_dim: int
    projected: int
    """Matrices that make them: 1 where values are keys as they are projected, 0 where they are another layer's."""


class LayerKind(NamedTuple):
    """What decides on the parameters of one layer: equal kinds have equally many."""

    routed: bool
    """Whether it has experts."""
    recurrent: bool
    only: str
    """Its one part, "mixer" or "feed_forward", where it has only one."""
    indexed: bool
    """Whether it has an indexer."""
    rate: int
    """How many tokens an entry stands for; 0: there are none."""
    hashed: bool
    """Whether a table chooses its experts."""
    heads: LayerHeads
    ffn: int
    """Width of its dense feed-forward."""
    told: bool
    """Whether it looks up n-grams of the tokens."""
    sinks: bool
    queries: int
    """Query heads."""
    unrotated: bool
    """Whether latent attention rotates nothing."""
    shares: bool
    """Whether latent attention is to the latents of another layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder. The defaults are those of Llama."""

    name: str
    family: str
    layers: int
    hidden: int
    ffn: int
    """Width of a dense feed-forward; 0 where no layer has one."""
    ffn_sizes: tuple[int, ...] = ()
    """Of each layer, where layers differ in it."""
    layer_heads: tuple[LayerHeads, ...] = ()
    """Of each layer, where layers differ in their heads; empty: those below."""
    query_heads: tuple[int, ...] = ()
    """Number of query heads of each layer, where layers differ in it; empty: `heads`, which is the most otherwise."""
    token_inputs: tuple[int, int] | None = None
    """What every layer is told of a token itself: numbers for each layer, and rows of the table that has them."""
    layer_factors: bool = False
    """Whether the residual stream has a factor behind every layer."""
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    windows: tuple[int | None, ...]
    """Sliding window of each layer; None where a layer sees everything."""
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """A norm per head on queries and keys."""
    whole_qk_norm: bool = False
    """A norm over all heads of queries, and one over all of keys."""
    sandwich_norms: bool = False
    gated_residual: bool = False
    """Whether a layer has two gates of the residual stream, and a norm behind its feed-forward alone."""
    one_norm: bool = False
    """Of a layer whose attention and feed-forward read the same."""
    expert_norm: bool = False
    """Whether there is a norm behind experts alone."""
    rope_factors: int = 0
    """Stored ones, of rotary frequencies."""
    norm_parts: int = 1
    """Numbers that a norm of the residual stream has for each dimension: gains, biases."""
    head_bias: bool = False
    sinks: bool = False
    """A learned attention sink per head."""
    window_sinks: bool = False
    """Whether layers with a window alone have them."""
    value_dim: int = 0
    """Size of a head of values as it is projected, where that is smaller than `head_dim`, as which it is cached."""
    gated_attention: bool = False
    """Whether queries come with a gate of the same size."""
    output_gate: bool = False
    """Whether such gates have a matrix of their own."""
    gates_by_head: bool = False
    """Whether there is then one for each head."""
    moe: Moe | None = None
    mla: Mla | None = None
    sparse_blocks: SparseBlocks | None = None
    delta: Delta | None = None
    mamba: Mamba | None = None
    short_conv: ShortConv | None = None
    compression: Compression | None = None
    gated_streams: GatedStreams | None = None
    kept_layers: int = 0
    """Layers that there are weights of, where each runs several times, and `layers` counts the runs; 0: all."""
    apart_streams: int = 0
    """Residual streams that are read and added to with one weight each, and not mixed."""
    mixed_streams: int = 0
    """The same of those that are mixed, and whose mean leaves the last layer."""
    only: tuple[Literal["mixer", "feed_forward"], ...] = ()
    """The one part that each layer has; such a feed-forward has no gate. Empty: every layer has both."""
    gate: bool = True
    """Whether dense feed-forwards have a gate, where layers have both parts."""
    activation_numbers: int = 0
    """Learned ones, of a dense feed-forward's activation."""
    stored: WeightFormat | None = None
    """How a checkpoint in few bits holds its matrices; None: dense."""
    served: bool = True
    """Whether Penstock's engine runs this family; others can be planned all the same."""

    def with_stored(self, stored: WeightFormat | None) -> ModelShape:
        """The same, of a checkpoint that holds its matrices like that."""
        return replace(self, stored=stored)

    def layer(self, index: int) -> LayerParts:
        """The parameters of one layer."""
        return self._parts(self._kind(index))

    def heads_in(self, index: int) -> LayerHeads:
        return self.layer_heads[index] if self.layer_heads else LayerHeads(self.kv_heads, self.head_dim, 2)

    def queries_in(self, index: int) -> int:
        return self.query_heads[index] if self.query_heads else self.heads

    def gates_of(self, queries: int, dim: int) -> int:
        """Gates of the output of so many heads of attention that is not over latents."""
        return queries * (1 if self.gates_by_head else dim) if self.gated_attention else 0

    def _kind(self, index: int) -> LayerKind:
        moe, mla, compression, recurrent = self.moe, self.mla, self.compression, self.recurrent
        indexed = mla is not None and bool(mla.indexed) and mla.indexed[index]
        indexed = indexed or (self.sparse_blocks is not None and self.sparse_blocks.layers[index])
        return LayerKind(
            routed=moe is not None and moe.layers[index],
            recurrent=recurrent is not None and recurrent.layers[index],
            only=self.only[index] if self.only else "",
            indexed=indexed if compression is None else compression.chosen[index],
            rate=0 if compression is None else compression.rates[index],
            hashed=moe is not None and bool(moe.hashed) and moe.hashed[index],
            heads=self.heads_in(index),
            ffn=self.ffn_sizes[index] if self.ffn_sizes else self.ffn,
            told=self.gated_streams is not None and self.gated_streams.tables[index] > 0,
            sinks=self.sinks and not (self.window_sinks and self.windows[index] is None),
            queries=self.queries_in(index),
            unrotated=mla is not None and bool(mla.unrotated) and mla.unrotated[index],
            shares=mla is not None and bool(mla.shared) and mla.shared[index],
        )

    def _parts(self, kind: LayerKind) -> LayerParts:
        hidden = self.hidden
        if kind.only == "feed_forward" and not kind.routed:
            biases = kind.ffn + hidden if self.mlp_bias else 0
            return LayerParts(0, 0, 0, 2 * hidden * kind.ffn, 0, 0, hidden + biases)
        query_output, key_value, latent, small = self._mixer(kind)
        if kind.only == "mixer":
            return LayerParts(query_output, key_value, latent, 0, 0, 0, small)
        if kind.only:
            query_output = key_value = latent = 0
            small = hidden
        if self.gated_streams is not None:
            counted = [self.gated_streams.around(hidden)]
            counted += [] if kind.recurrent else [self.gated_streams.index(hidden)]
            counted += [self.gated_streams.ngrams(hidden)] if kind.told else []
            latent += sum(matrices for matrices, _ in counted)
            small += sum(others for _, others in counted)
        if self.token_inputs is not None:
            latent += 2 * hidden * self.token_inputs[0]
            small += hidden
        moe = self.moe
        if moe is None or not kind.routed:
            matrices = 3 if self.gate else 2
            small += (matrices - 1) * kind.ffn + hidden if self.mlp_bias else 0
            small += self.activation_numbers
            return LayerParts(query_output, key_value, latent, matrices * hidden * kind.ffn, 0, 0, small)
        return LayerParts(
            query_output,
            key_value,
            latent,
            ((3 if moe.gate else 2) * moe.shared_ffn + 2 * moe.latent) * hidden,
            moe.experts * self._expert,
            hidden * (moe.experts + (1 if moe.shared_gate else 0)),
            small + self._beside_experts(moe, kind.hashed),
        )

    def _mixer(self, kind: LayerKind) -> tuple[int, int, int, int]:
        """Parameters that a layer has before its feed-forward, as `LayerParts` names them: `query_output`,
        `key_value`, `latent`, and `small` with all norms of the layer."""
        hidden, key_value = self.hidden, 0
        norms = 4 if self.sandwich_norms else 1 if self.one_norm or kind.only else 2
        norms += 3 if self.gated_residual else 0
        small = hidden * norms * self.norm_parts + (kind.queries if kind.sinks else 0) + self.layer_factors
        if self.apart_streams:
            n = self.apart_streams
            small += 2 * (2 * n * (n * hidden + 1) + 2)
        if self.mixed_streams:
            n = self.mixed_streams
            small += 2 * ((2 + n) * n * (n * hidden + 1) + 3)
        mla, mixer = self.mla, self.recurrent if kind.recurrent else None
        if mixer is not None and not self._beside:
            return mixer.matrices(hidden), 0, 0, small + mixer.others(hidden)
        if mla is not None:
            mla = mla.of(unrotated=kind.unrotated, shares=kind.shares)
            query_output = mla.by_heads(hidden, self.heads, self.gated_attention)
            latent = mla.for_all_heads(hidden, kind.indexed, kind.routed)
            small += mla.others(hidden, self.heads, kind.indexed) + (hidden if self.output_bias else 0)
        elif self.compression is not None:
            query_output = self.compression.by_heads(hidden)
            latent = self.compression.for_all_heads(hidden, kind.rate, kind.indexed)
            small += self.compression.others(hidden, kind.rate, kind.indexed)
        else:
            dim, own = kind.heads.head_dim, kind.heads.projected
            q_size, kv_size = kind.queries * dim, kind.heads.kv_heads * dim
            gates = self.gates_of(kind.queries, dim)
            narrower = dim - (self.value_dim or dim)
            made = own * kv_size - kind.heads.kv_heads * narrower
            query_output, key_value = hidden * (2 * q_size + gates - kind.queries * narrower), hidden * made
            latent = 0
            biased = q_size + made + (0 if self.output_gate else gates)
            small += (biased if self.qkv_bias else 0) + (hidden if self.output_bias else 0)
            small += (2 if own else 1) * dim if self.qk_norm else 0
            small += q_size + kv_size if self.whole_qk_norm else 0
            if mixer is not None:
                query_output += mixer.matrices(hidden)
                small += mixer.others(hidden)
            if kind.indexed and self.sparse_blocks is not None:
                by_heads, whole, norms = self.sparse_blocks.parameters(hidden)
                query_output, latent, small = query_output + by_heads, latent + whole, small + norms
        return query_output, key_value, latent, small

    def _beside_experts(self, moe: Moe, hashed: bool) -> int:
        """Parameters of a layer with experts that are in none of its matrices."""
        hidden, ups = self.hidden, 2 if moe.gate else 1
        small = 4 * hidden + moe.experts if moe.apart else 0  # three more norms, the router's, factors of experts
        small += hidden if self.expert_norm else 0
        small += 2 * moe.latent if moe.normed else 0
        small += moe.experts * (ups * moe.ffn + hidden) if moe.bias else 0
        small += ups * moe.shared_ffn + hidden if self.mlp_bias and moe.shared_ffn else 0
        small += moe.experts if moe.router_bias and not hashed else 0
        small += self.vocab * moe.top_k if hashed else 0
        return small + (moe.latent + hidden if moe.latent and self.mlp_bias else 0)

    def layer_groups(self, first: int = 0, last: int | None = None) -> list[tuple[LayerParts, int]]:
        """Of some layers: those that are alike, and how many."""
        end = self.layers if last is None else last
        kinds = Counter(self._kind(index) for index in range(first, end))
        return [(self._parts(kind), count) for kind, count in sorted(kinds.items())]

    @property
    def _expert(self) -> int:
        """Parameters of one routed expert of a layer."""
        moe = self.moe
        return 0 if moe is None else (3 if moe.gate else 2) * (moe.latent or self.hidden) * moe.ffn

    @property
    def embedding_parameters(self) -> int:
        """With the table of what layers are told of tokens, and what makes the rest of that."""
        size, vocab = self.token_inputs or (0, 0)
        return self.vocab * self.hidden + self.layers * size * (vocab + self.hidden) + size

    @property
    def head_parameters(self) -> int:
        """Of the output head, which is the embedding where the two are tied."""
        return self.vocab * self.hidden

    @property
    def matrix_parameters(self) -> int:
        """Of the layers' matrices that every token passes: read once per step, used once per token."""
        return sum(part.matrices * count for part, count in self.layer_groups())

    @property
    def expert_parameters(self) -> int:
        """Of one routed expert, over all layers that have them."""
        return 0 if self.moe is None else self.moe.count * self._expert

    @property
    def parameters(self) -> int:
        """Of the whole model; a tied head is not counted twice."""
        layers = sum(part.total * count for part, count in self.layer_groups())
        if self.kept_layers:  # which are all alike; and a vector that the first of them reads
            layers = layers * self.kept_layers // self.layers + self.hidden
        head = 0 if self.tied_embeddings else self.head_parameters
        small = self.norm_parts * self.hidden + (self.vocab if self.head_bias else 0) + self.rope_factors
        streams = self.compression or self.gated_streams
        last = 0 if streams is None else streams.head(self.hidden)
        if self.apart_streams:
            last = self.apart_streams * (self.apart_streams * self.hidden + 1) + 1
        tables = 0 if self.gated_streams is None else self.gated_streams.table
        return self.embedding_parameters + layers + small + head + last + tables

    @property
    def active_parameters(self) -> int:
        """That one token uses: all but the experts that it does not visit."""
        if self.moe is None:
            return self.parameters
        return self.parameters - (self.moe.experts - self.moe.top_k) * self.expert_parameters

    def experts_visited(self, tokens: int) -> float:
        """Experts per layer that this many tokens visit together, if all are as likely."""
        if self.moe is None:
            return 0.0
        return self.moe.experts * (1 - (1 - self.moe.top_k / self.moe.experts) ** tokens)

    @property
    def kv_elements_per_layer(self) -> int:
        """Elements that one token leaves in the cache of one layer, without those for an indexer."""
        return 2 * self.kv_heads * self.head_dim if self.mla is None else self.mla.cached

    @property
    def kv_elements(self) -> int:
        """Elements that one token leaves in the cache of all layers."""
        if self.compression is not None:
            return sum(round(self.compression.dim / rate) for rate in self.compression.rates if rate)
        return self.kv_elements_in(0, self.layers)

    def kv_elements_in(self, first: int, last: int, shards: int = 1) -> int:
        """Elements that one token leaves in some layers' cache, on one of `shards`; without those for an indexer."""
        if self.mla is not None:
            return sum(sum(self.mla.kept_in(index, index + 1)) for index in range(first, last) if self._attended(index))
        return sum(self._kept_in(index, shards) for index in range(first, last) if self._attended(index))

    def _kept_in(self, index: int, shards: int = 1) -> int:
        heads = self.heads_in(index)
        return 2 * max(1, heads.kv_heads // shards) * heads.head_dim if heads.projected else 0

    @property
    def recurrent(self) -> Delta | Mamba | ShortConv | None:
        """The mixers with a state."""
        return self.delta or self.mamba or self.short_conv

    @property
    def recurrent_layers(self) -> int:
        return self.recurrent_in(0, self.layers)

    def recurrent_in(self, first: int, last: int) -> int:
        """How many of some layers keep a state."""
        if self.compression is not None:
            return last - first
        return 0 if self.recurrent is None else sum(self.recurrent.layers[first:last])

    def attended_in(self, first: int, last: int) -> int:
        """How many of some layers keep what their tokens leave."""
        return sum(self._attended(index) for index in range(first, last))

    def _attended(self, index: int) -> bool:
        if self.only and self.only[index] == "feed_forward":
            return False
        if self.compression is not None:
            return self.compression.rates[index] > 0
        return self._beside or self.recurrent is None or not self.recurrent.layers[index]

    @property
    def _beside(self) -> bool:
        """Whether recurrent layers have attention too."""
        return self.mamba is not None and self.mamba.beside

    @property
    def attention_windows(self) -> tuple[int | None, ...]:
        """The windows of the layers that have attention."""
        return tuple(window for index, window in enumerate(self.windows) if self._attended(index))

    @property
    def state_bytes(self) -> int:
        """Bytes of a running sequence beside what its tokens leave, whatever its length."""
        return self.state_bytes_in(0, self.layers)

    def state_bytes_in(self, first: int, last: int, element: int = 2, shards: int = 1) -> int:
        """The same of some layers, on one of `shards`, which divide states of recurrent layers by heads; `element`:
        bytes of what activations are."""
        if self.compression is not None:
            return self.compression.state_bytes(first, last, element)
        whole = 0 if self.mla is None else self.mla.state_bytes(first, last)
        if self.gated_streams is not None:
            whole += self.gated_streams.state_bytes(first, last, self.hidden, element)
        if self.recurrent is None:
            return whole
        return whole + self.recurrent_in(first, last) * self.recurrent.state_bytes(element) // shards

    def index_keys(self, first: int, last: int, tokens: int) -> int:
        """Elements that a block of tokens has for the indexers of some layers, which have the type of activations."""
        return sum(one.index_keys(first, last, tokens) for one in (self.mla, self.sparse_blocks) if one is not None)

    def kv_bytes_per_token(self, kv_bytes: float = 2.0) -> int:
        """Bytes that one token leaves in the cache, with elements of `kv_bytes` each, and of 2 for indexers."""
        if self.compression is not None:
            return round(self.compression.block_bytes(0, self.layers, _BLOCK, kv_bytes, 2.0) / _BLOCK)
        index = round(2 * self.index_keys(0, self.layers, _BLOCK) / _BLOCK)
        if self.gated_streams is not None:
            attending = self.attended_in(0, self.layers)
            index += round(self.gated_streams.block_bytes(attending, _BLOCK, 2.0) / _BLOCK)
        return round(self.kv_elements * kv_bytes) + index

    def context_elements(self, context: int) -> int:
        """Elements of the cache that the next token attends to after `context` tokens: windows limit what is read."""
        if self.compression is not None:
            return self.compression.seen(context)
        if self.layer_heads:  # those that share keys and values read them too
            read = (2 * heads.kv_heads * heads.head_dim for heads in self.layer_heads)
            pairs = zip(read, self.windows, strict=True)
            return sum(each * (context if window is None else min(context, window)) for each, window in pairs)
        seen = sum(context if window is None else min(context, window) for window in self.attention_windows)
        return seen * self.kv_elements_per_layer

    @property
    def window(self) -> int | None:
        """The largest window where every layer has one: a sequence then keeps no more than that. One layer that sees
        everything needs all blocks of a sequence, and blocks span all layers (`engine.kv`)."""
        windows = [window for window in self.windows if window is not None]
        return max(windows) if len(windows) == len(self.windows) else None
