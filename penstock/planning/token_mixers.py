"""What mixes the tokens of a layer, as it is counted: latent attention, and the recurrent mixers in place of attention,
which keep nothing per token but a state per sequence. `Compression` is in a file of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Mla:
    """Multi-head latent attention: a token leaves one latent vector and one rotated key, for all heads together."""

    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    q_rank: int | None = None
    """Width that queries are compressed to; None: they are not."""
    bias: bool = False
    """Whether the compressing matrices have biases."""
    index_heads: int = 0
    index_dim: int = 0
    """Of indexers, which choose the tokens that are attended to; 0: there are none."""
    indexed: tuple[bool, ...] = ()
    """Which layers have one: it keeps a key of each token."""
    index_rate: int = 0
    """Tokens that have one key together, which softmaxes make of theirs; 0: each has its own."""
    gated_queries: bool = False
    """Whether queries are made of the compressed vector with its norm and without, each with a gate."""
    gate_rank: int = 0
    """Of the gates behind the norms before attention and before experts; 0: there are none."""
    unrotated: tuple[bool, ...] = ()
    """Which layers rotate nothing: all of a head is plain there; empty: none."""
    shared: tuple[bool, ...] = ()
    """Which layers attend to the latents of another; empty: none."""
    starts: tuple[bool, ...] = ()
    """With which layers a stage of a pipeline may begin; empty: with any."""
    index_from_inputs: bool = False
    """Whether queries of indexers are made of what the layer reads, behind a LayerNorm."""
    head_scales: bool = False
    """Whether every head, those of indexers too, has two numbers that queries are scaled by."""
    shares: bool = False
    """Of a layer, whether it makes no latents."""

    def of(self, *, unrotated: bool, shares: bool) -> Mla:
        """Of a layer like that."""
        rotary = 0 if unrotated else self.rope_dim
        return replace(self, rope_dim=rotary, nope_dim=self.nope_dim + self.rope_dim - rotary, shares=shares)

    def at(self, layer: int) -> Mla:
        unrotated, shares = (bool(kinds) and kinds[layer] for kinds in (self.unrotated, self.shared))
        return self.of(unrotated=unrotated, shares=shares) if unrotated or shares else self

    def kept_in(self, first: int, last: int) -> list[int]:
        """Elements of the cache per token of those layers that have their own latents, without the indexer's."""
        layers = (self.at(layer) for layer in range(first, last))
        return [one.cached for one in layers if not one.shares]

    @property
    def cached(self) -> int:
        """Elements of the cache per token that a layer reads, without the indexer's."""
        return self.kv_rank + self.rope_dim

    @property
    def made(self) -> int:
        """Those that it makes."""
        return 0 if self.shares else self.cached

    def _index_inputs(self, hidden: int) -> int:
        """Width of what queries of an indexer are made of."""
        return hidden if self.index_from_inputs else self.q_rank or 0

    def by_heads(self, hidden: int, heads: int, output_gate: bool) -> int:
        """Parameters of a layer's matrices that have a part for each head."""
        queries = (hidden if self.q_rank is None else self.q_rank) * (self.nope_dim + self.rope_dim)
        if self.gated_queries:  # both forms of the compressed vector, and a gate behind every query
            queries = 2 * (self.q_rank or 0) * (self.nope_dim + self.rope_dim + self.value_dim)
        outputs = self.value_dim * hidden * (1 + output_gate)
        return heads * (queries + self.kv_rank * (self.nope_dim + self.value_dim) + outputs)

    def for_all_heads(self, hidden: int, indexed: bool, routed: bool) -> int:
        """Parameters of the matrices that all heads share: those that compress, the indexer's, and those of gates
        behind norms; `routed` layers have one before their experts too."""
        rank, queries = self.q_rank or 0, self._index_inputs(hidden) * self.index_heads * self.index_dim
        indexer = hidden * self.index_dim + queries if indexed else 0
        return hidden * (self.made + rank) + indexer + 2 * hidden * self.gate_rank * (1 + routed)

    def others(self, hidden: int, heads: int, indexed: bool) -> int:
        """Parameters beside them."""
        rank = self.q_rank or 0
        biases = self.made + rank if self.bias else 0
        indexer = hidden * self.index_heads + 2 * self.index_dim + (2 * hidden if self.index_from_inputs else 0)
        indexer += (hidden + self.index_rate) * self.index_dim if self.index_rate else 0
        scaled = heads + (self.index_heads if indexed else 0) if self.head_scales else 0
        return rank + (0 if self.shares else self.kv_rank) + biases + (indexer if indexed else 0) + 2 * scaled

    def adapted(self, hidden: int, heads: int, output_gate: bool, indexed: bool, routed: bool) -> tuple[int, int]:
        """Inputs and outputs of the linears of a layer that adapters may change, of which a rank has `heads`."""
        queries, values, rank = heads * (self.nope_dim + self.rope_dim), heads * self.value_dim, self.q_rank or 0
        inputs, outputs = (1 if self.shares else 2) * hidden + rank + values, rank + self.made + queries + hidden
        if self.gated_queries:
            inputs, outputs = inputs + rank, outputs + values
        if output_gate:
            inputs, outputs = inputs + hidden, outputs + values
        if indexed:
            inputs += 2 * hidden + self._index_inputs(hidden)
            outputs += self.index_dim + self.index_heads * self.index_dim + self.index_heads
        gates = (hidden + self.gate_rank) * (1 + routed) if self.gate_rank else 0
        return inputs + gates, outputs + gates

    def index_keys(self, first: int, last: int, tokens: int) -> int:
        """Elements that a block of tokens has for the indexers of some layers, which have the type of activations."""
        return -(-tokens // (self.index_rate or 1)) * self.index_dim * sum(self.indexed[first:last])

    def state_bytes(self, first: int, last: int) -> int:
        """What indexers of some layers keep of a sequence, whatever its length: softmaxes in float32."""
        return 12 * self.index_dim * sum(self.indexed[first:last]) if self.index_rate else 0


@dataclass(frozen=True, slots=True)
class SparseBlocks:
    """Indexers that choose blocks of the context for every KV head, beside attention."""

    layers: tuple[bool, ...]
    """Which layers have one: it keeps a key of each token."""
    heads: int
    dim: int

    def parameters(self, hidden: int) -> tuple[int, int, int]:
        """Of a layer: what is divided by heads, what every shard has, and norms."""
        return hidden * self.heads * self.dim, hidden * self.dim, 2 * self.dim

    def adapted(self, hidden: int, shards: int) -> tuple[int, int]:
        """Inputs and outputs of its linears on one of so many shards."""
        return 2 * hidden, (max(1, self.heads // shards) + 1) * self.dim

    def index_keys(self, first: int, last: int, tokens: int) -> int:
        """Elements that a block of tokens has for the indexers of some layers, which have the type of activations."""
        return tokens * self.dim * sum(self.layers[first:last])


@dataclass(frozen=True, slots=True)
class Delta:
    """Gated delta nets in place of attention: nothing is kept per token, and a state per sequence."""

    layers: tuple[bool, ...]
    """Which layers have one."""
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv: int
    grouped: bool = True
    """Whether a checkpoint stores projections by key head, as two matrices; else as four."""
    by_channel: bool = False
    """Whether every channel has a decay; decays and output gates are then made of as many numbers as a head has."""

    @property
    def channels(self) -> int:
        """Of the convolution over queries, keys and values."""
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim

    def matrices(self, hidden: int) -> int:
        """Parameters of the projections."""
        values = self.v_heads * self.v_dim
        if self.by_channel:
            narrow, keys = self.k_dim + self.v_dim, self.v_heads * self.k_dim
            return hidden * (self.channels + values + self.v_heads + narrow) + self.k_dim * keys + self.v_dim * values
        return hidden * (self.channels + 2 * values + 2 * self.v_heads)

    def others(self, hidden: int) -> int:
        """Parameters beside them; none depend on `hidden`, unlike those of other mixers."""
        biases = self.v_heads * (self.k_dim if self.by_channel else 1)
        return self.conv * self.channels + self.v_heads + biases + self.v_dim

    def state_bytes(self, element: int = 2) -> int:
        """Of one sequence in one layer: matrices in float32, the last inputs of the convolution as activations are."""
        return 4 * self.v_heads * self.k_dim * self.v_dim + element * self.conv * self.channels


@dataclass(frozen=True, slots=True)
class Mamba:
    """Mamba-2 layers in place of attention; see `Delta`."""

    layers: tuple[bool, ...]
    """Which layers have one."""
    heads: int
    head_dim: int
    groups: int
    state: int
    conv: int
    conv_bias: bool
    in_bias: bool
    out_bias: bool
    norm_groups: int
    """Runs of channels that are normalized by themselves; 0: there is no norm."""
    beside: bool = False
    """Whether these layers have attention too."""

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return self.inner + 2 * self.groups * self.state

    def matrices(self, hidden: int) -> int:
        """Parameters of the projections."""
        return hidden * (self.inner + self.channels + self.heads + self.inner)

    def others(self, hidden: int) -> int:
        """Parameters beside them."""
        biases = (self.inner + self.channels + self.heads if self.in_bias else 0) + (hidden if self.out_bias else 0)
        norm = self.inner if self.norm_groups else 0
        return self.channels * (self.conv + self.conv_bias) + 3 * self.heads + norm + biases

    def state_bytes(self, element: int = 2) -> int:
        """As of a delta net."""
        return 4 * self.inner * self.state + element * self.conv * self.channels


@dataclass(frozen=True, slots=True)
class ShortConv:
    """Gated short convolutions in place of attention; see `Delta`."""

    layers: tuple[bool, ...]
    """Which layers have one."""
    channels: int
    width: int
    bias: bool

    def matrices(self, hidden: int) -> int:
        """Parameters of the projections."""
        return 4 * hidden * self.channels

    def others(self, hidden: int) -> int:
        """Parameters beside them."""
        return self.width * self.channels + (4 * self.channels + hidden if self.bias else 0)

    def state_bytes(self, element: int = 2) -> int:
        """Of one sequence in one layer: the last inputs, as activations are."""
        return element * self.width * self.channels
