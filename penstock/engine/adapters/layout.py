"""Where adapters add to a decoder, and how one adapter's matrices lie in memory.

An adapter of rank r adds B(A x) to a linear: A is [r, inputs], B is [outputs, r]. Linears that the decoder fuses
(query, key and value; gate and up) keep one A and B per part. All matrices of an adapter are one flat buffer, so that
bringing it to the device is one copy:

    for each layer, for each site:   A [parts * r, inputs]   B transposed [r, outputs]     (B holds alpha / r already)

A site of experts has these two for every expert of the layer. Such sites lie behind all others, so that an adapter that
does not touch them ends before them; before these lie embedding and head, which no layer has. Everything is
proportional to r: a site begins at r times its `start`, and adapters of different rank need no padding. On CUDA B stays
[outputs, r], and r is filled up with zeros to a multiple of 8: what one output needs of B is then one aligned read, and
a program that computes a single output wastes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

from penstock.engine.backends.activation import ClampedSwiglu, has_gate
from penstock.engine.models import deepseek_v4
from penstock.engine.models.families import family_of
from penstock.engine.models.kimi_linear import DECAY_DOWN, DECAY_UP, GATE_DOWN, GATE_UP, QUERY_KEY_VALUE, RATE
from penstock.engine.models.kimi_linear import OUTPUT as OUT_OF_CHANNELS
from penstock.engine.models.latent import INDEX_KEYS, INDEX_QUERIES, INDEX_WEIGHTS, INDEXER
from penstock.engine.models.model_config import CompressionConfig, DeltaConfig, LatentConfig, ModelConfig

ROUTER, EXPERT_GATE_UP, EXPERT_DOWN = "router", "expert_gate_up", "expert_down"
SHARED, SHARED_GATE = "shared_", "shared_gate"
LATENT_IN, LATENT_OUT = "latent_in", "latent_out"
"""Attributes of sites of a mixture of experts: `adapters.experts` knows where they are."""
LATENT_KEYS, LATENT_VALUES = "latent_keys", "latent_values"
"""Attributes of sites of heads: `adapters.latent` knows where they are."""
EMBEDDING, HEAD = "embedding", "lm_head"
"""Attributes of what no layer has: `adapters.ends` knows where they are."""
ANY = "#"
"""Stands for the number of an expert in the names of modules."""
DELTA_MIX, DELTA_GATES, DELTA_OUTPUT = "delta_mix", "delta_gates", "delta_output"
DELTA_DECAYS, DELTA_OUTPUT_GATES = "decay_expand", "gate_expand"
"""Attributes of sites of delta nets: `adapters.delta_nets` knows where they are."""
_DELTA = "linear_attn."
_BLOCKS = ("mlp.", "block_sparse_moe.", "feed_forward.", "mixer.")
"""What the part of a layer with router and experts is called."""
_WIDE = 8
"""Elements of two bytes in the widest load of a thread."""


@dataclass(frozen=True, slots=True)
class Stack:
    """A parameter with one matrix for every expert of a layer."""

    paths: tuple[str, ...]
    """What it may be called below the layer: that has changed between releases of transformers."""
    interleaved: bool = False
    """Whether outputs of its two parts alternate."""
    reversed: bool = False
    """Whether PEFT takes its inputs for outputs, which it does where a matrix is stored transposed and does not say."""


@dataclass(frozen=True, slots=True)
class Site:
    """A linear of every decoder layer that adapters may add to."""

    attribute: str
    """Its name in the layer's mixer or `GatedMlp`; with dots, in a part of the mixer."""
    modules: tuple[str, ...]
    """Checkpoint modules stacked in it, below the layer."""
    sizes: tuple[int, ...]
    """Outputs of each module."""
    inputs: int
    fused: str = ""
    """The module's name in checkpoints that fuse the parts as we do."""
    aliases: tuple[str, ...] = ()
    """Other names of the module, where it has one part."""
    of_attention: bool = False
    """Whether only layers with attention have it; see `adapt`."""
    of_recurrent: bool = False
    """Whether only layers without attention have it."""
    layers: tuple[bool, ...] | None = None
    """Which layers have it; None: all."""
    further: bool = False
    """Whether few adapters touch it (experts, routers, delta nets): steps without such adapters run a decoder in which
    it is the ordinary linear."""
    experts: int = 0
    """Above 0: the linears of this many experts, each with matrices of its own."""
    heads: Literal["", "keys", "values"] = ""
    """Of what makes keys and values of latents: one of the two, with a head where others have an expert. See
    `adapters.latent`."""
    stack: Stack | None = None
    """Of experts: the parameter that holds this linear of all of them, as PEFT sees it."""
    end: Literal["", "embedding", "head"] = ""
    """Of what stands before or behind all layers: one of the two. See `adapters.ends`."""
    factor: float = 1.0
    """What the model's own matrix was multiplied by when it was loaded."""
    virtual_factor: float | None = 1.0
    """Of the embedding: what rows are multiplied by that stand for no token; None: there can be none."""
    closed: bool = False
    """Of embedding and head: whether the model looks tokens up in other tables too, so that there can be no others."""
    gated: bool = False
    """Whether what its last part gives, times what the others give, is all that the next site reads."""

    @property
    def outputs(self) -> int:
        return sum(self.sizes)

    @property
    def each(self) -> int:
        """Elements per rank of one linear: A of every part, and B."""
        return len(self.sizes) * self.inputs + self.outputs

    @property
    def unit(self) -> int:
        """Elements per rank in a layer."""
        return self.each * max(1, self.experts)

    def is_in(self, layer: int) -> bool:
        return self.layers is None or self.layers[layer]


@dataclass(frozen=True, slots=True)
class PlacedSite:
    """One site of one layer, with its place in an adapter's buffer."""

    site: Site
    layer: int
    index: int
    """Which site of its layer."""
    start: int
    """Times the rank: first element of A; B follows A."""
    column: int = 0
    """Of its first output, where an adapter has one number for every output; see `adapters.vectors`."""


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """All sites of a model, in buffer order."""

    sites: tuple[Site, ...]
    layers: int
    by_output: bool = False
    """B is [outputs, r] and r a multiple of `_WIDE`; else B is transposed."""
    ends: bool = True
    """Whether it has room for embedding and head: stages behind the first have neither."""
    tied: bool = False
    """Whether the head is the embedding."""
    virtual_only: bool = False
    """Whether its embedding takes virtual tokens and no other adapters."""

    def width(self, rank: int) -> int:
        """The r that an adapter of this rank is stored with."""
        return -(-rank // _WIDE) * _WIDE if self.by_output else rank

    def up(self, flat: Tensor, width: int, outputs: int) -> Tensor:
        """B of a site as [r, outputs], whatever lies in memory: a view."""
        return flat.view(outputs, width).t() if self.by_output else flat.view(width, outputs)

    @property
    def shared_unit(self) -> int:
        """Elements per rank of an adapter that touches no expert, embedding or head."""
        return sum(self._units(layer, experts=False) for layer in range(self.layers))

    @property
    def unit_to_ends(self) -> int:
        """The same of one that touches no expert."""
        return self.shared_unit + self._units_of_ends(len(self.sites))

    @property
    def unit(self) -> int:
        """Elements of an adapter per rank."""
        return self.unit_to_ends + sum(self._units(layer, experts=True) for layer in range(self.layers))

    @property
    def columns(self) -> int:
        """Outputs of all sites, those of experts aside."""
        ends = sum(site.outputs for site in self.sites if site.end) if self.ends else 0
        return ends + sum(self._outputs(layer) for layer in range(self.layers))

    def place(self, layer: int, index: int) -> PlacedSite:
        """`layer`: 0 for embedding and head."""
        site = self.sites[index]
        if site.end:
            column = sum(self._outputs(before) for before in range(self.layers))
            column += sum(one.outputs for one in self.sites[:index] if one.end)
            return PlacedSite(site, layer, index, self.shared_unit + self._units_of_ends(index), column)
        experts = bool(site.experts)
        start = self.unit_to_ends if experts else 0
        start += sum(self._units(before, experts) for before in range(layer))
        start += self._units(layer, experts, self.sites[:index])
        column = sum(self._outputs(before) for before in range(layer)) + self._outputs(layer, self.sites[:index])
        return PlacedSite(site, layer, index, start, column)

    def touches_further(self, ranks: Tensor) -> bool:
        """Whether an adapter with these ranks of the sites touches one that few do."""
        return any(site.further and rank for site, rank in zip(self.sites, ranks.tolist(), strict=True))

    def _units(self, layer: int, experts: bool, sites: tuple[Site, ...] | None = None) -> int:
        every = self.sites if sites is None else sites
        return sum(site.unit for site in every if not site.end and bool(site.experts) is experts and site.is_in(layer))

    def _outputs(self, layer: int, sites: tuple[Site, ...] | None = None) -> int:
        every = self.sites if sites is None else sites
        return sum(site.outputs for site in every if not site.end and not site.experts and site.is_in(layer))

    def _units_of_ends(self, index: int) -> int:
        """Of those before a site."""
        return sum(site.unit for site in self.sites[:index] if site.end) if self.ends else 0


Span = tuple[int, int]
"""First and one past the last."""
Rows = Span | tuple[Span, ...]
"""Some rows of a matrix: a run of them, or several."""


def rows_of(matrix: Tensor, rows: Rows) -> Tensor:
    if isinstance(rows[0], tuple):
        return torch.cat([rows_of(matrix, each) for each in rows if isinstance(each, tuple)])
    first, last = rows
    assert isinstance(last, int)
    return matrix[first:last]


@dataclass(frozen=True, slots=True)
class AdapterCut:
    """The part of every adapter that one process keeps: cut like the linears that it adds to."""

    whole: AdapterLayout
    layers: Span
    inputs: tuple[Span, ...]
    """Of each site: columns of A."""
    outputs: tuple[tuple[Rows, ...], ...]
    """Of each site and each of its parts: rows of B."""
    heads: Span = (0, 0)
    """Of sites of heads, which."""


def uncut(layout: AdapterLayout) -> AdapterCut:
    """All of every adapter: what an engine on one device keeps."""
    inputs = tuple((0, site.inputs) for site in layout.sites)
    outputs = tuple(tuple((0, size) for size in site.sizes) for site in layout.sites)
    heads = max((site.experts for site in layout.sites if site.heads), default=0)
    return AdapterCut(layout, (0, layout.layers), inputs, outputs, (0, heads))


def layout_of(
    config: ModelConfig, *, by_output: bool = False, experts: bool = True, head_rows: int | None = None
) -> AdapterLayout:
    """Attention and feed-forward linears, routers and experts, embedding and head, the same sites for all parts of a
    model; experts only with `experts`, since they are large, and so is what makes keys and values of latents.
    `head_rows`: see `compose_decoder`."""
    sites = (
        *_attention_sites(config),
        *_latent_sites(config, experts),
        *_dense_sites(config),
        *_expert_sites(config, experts),
        *_end_sites(config, head_rows),
    )
    return AdapterLayout(sites, config.num_layers, by_output, ends=head_rows != 0, tied=config.tied_embeddings)


def _end_sites(config: ModelConfig, head_rows: int | None) -> tuple[Site, Site]:
    """An embedding is a linear that reads a one for its token, and zeros."""
    hidden, vocab, name = config.hidden_size, config.vocab_size, family_of(config.family).names.embedding
    factor = config.embedding_scale
    return (
        Site(
            EMBEDDING,
            (name,),
            (hidden,),
            vocab,
            further=True,
            end="embedding",
            factor=factor,
            virtual_factor=None if config.other_tables else config.virtual_scale,
            closed=config.other_tables,
        ),
        Site(HEAD, (HEAD,), (head_rows or vocab,), hidden, further=True, end="head", closed=config.other_tables),
    )


def _attention_sites(config: ModelConfig) -> tuple[Site, ...]:
    if config.layer_heads:
        return _sites_by_heads(config)
    hidden, q_size, kv_size = (
        config.hidden_size,
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
    )
    names, latent = family_of(config.family).names, config.latent
    if latent is not None:
        at, narrow = names.attention, latent.query_rank
        of: dict[str, Any] = {"of_attention": True, "layers": _with_latents(config)}
        first, size = ("q_proj", q_size) if narrow is None else ("q_a_proj", narrow)
        made = (f"{at}{first}", f"{at}kv_a_proj_with_mqa"), (size, latent.rank + latent.rotary)
        up = () if narrow is None else (Site("query_up", (f"{at}q_b_proj",), (q_size,), narrow, **of),)
        output = Site("output", (at + names.output,), (hidden,), config.num_heads * latent.value, **of)
        nets = () if config.delta is None else _channel_delta_sites(config.delta, at, hidden)
        return Site("inputs", *made, hidden, **of), *up, output, *nets, *_index_sites(config, latent)
    if config.compression is not None:
        return _compressed_sites(config, config.compression)
    qkv = tuple(names.attention + part for part in names.qkv)
    q_rows = 2 * q_size if config.gated_attention else q_size
    delta, mamba = config.delta, config.mamba
    attended = recurrent = None
    if config.only:
        recurrent = (False,) * config.num_layers if mamba is None else mamba.layers
        attended = tuple(part == "mixer" and not own for part, own in zip(config.only, recurrent, strict=True))
    fused = names.fused_qkv and names.attention + names.fused_qkv
    attention = (
        Site("qkv", qkv, (q_rows, kv_size, kv_size), hidden, fused, of_attention=True, layers=attended),
        Site("output", (names.attention + names.output,), (hidden,), q_size, of_attention=True, layers=attended),
    )
    if config.output_gate:
        gate = Site("output_gate", (names.attention + names.output_gate,), (q_size,), hidden, of_attention=True)
        return *attention, gate
    if delta is not None:
        return *attention, *_delta_sites(delta, hidden)
    if (short := config.short_conv) is not None:
        of_short: dict[str, Any] = {"of_recurrent": True, "layers": short.layers}
        return (
            *attention,
            Site("in_proj", (f"{names.short_conv}in_proj",), (3 * short.channels,), hidden, **of_short),
            Site("out_proj", (f"{names.short_conv}out_proj",), (hidden,), short.channels, **of_short),
        )
    if mamba is None:
        return attention
    width = mamba.inner + mamba.channels + mamba.heads
    of_mamba: dict[str, Any] = {"of_recurrent": True, "layers": recurrent}
    return (
        *attention,
        Site("in_proj", (f"{names.mamba}in_proj",), (width,), hidden, **of_mamba),
        Site("out_proj", (f"{names.mamba}out_proj",), (hidden,), mamba.inner, **of_mamba),
    )


def _sites_by_heads(config: ModelConfig) -> tuple[Site, ...]:
    """Of layers that differ in their heads, or in whose keys and values they attend to: two for each kind, in one order
    for the whole model and for any stage of it, which may have no layer of a kind."""
    names, hidden, every = family_of(config.family).names, config.hidden_size, range(config.num_layers)
    kinds = [(config.windows[layer] is None, config.projects(layer) == "both") for layer in every]
    sites: list[Site] = []
    for kind in product((False, True), (False, True) if config.key_sources else (False,)):
        found = next((layer for layer in every if kinds[layer] == kind), 0)
        (kv_heads, dim), shared = config.heads_in(found), config.projects(found)
        queries, keys, values = config.num_heads * dim, kv_heads * dim, config.values_in(found)
        parts = {"": 3, "values": 2, "both": 1}[shared]
        modules = tuple(names.attention + part for part in names.qkv)[:parts]
        of: dict[str, Any] = {"of_attention": True, "layers": tuple(own == kind for own in kinds)}
        sites.append(Site("qkv", modules, (queries, keys, values)[:parts], hidden, **of))
        output = names.attention + names.output
        sites.append(Site("output", (output,), (hidden,), config.attended_in(found), **of))
    return tuple(sites)


def _index_sites(config: ModelConfig, latent: LatentConfig) -> tuple[Site, ...]:
    """Of what chooses the tokens that are attended to; only their order says something, so few adapters touch it."""
    index, at = latent.index, f"{family_of(config.family).names.attention}{INDEXER}"
    if index is None or latent.query_rank is None:
        return ()
    of: dict[str, Any] = {"layers": index.layers, "further": True}
    return (
        Site("indexer.keys", (at + INDEX_KEYS,), (index.dim,), config.hidden_size, **of),
        Site("indexer.queries", (at + INDEX_QUERIES,), (index.heads * index.dim,), latent.query_rank, **of),
        Site("indexer.head_weights", (at + INDEX_WEIGHTS,), (index.heads,), config.hidden_size, **of),
    )


def _compressed_sites(config: ModelConfig, shape: CompressionConfig) -> tuple[Site, ...]:
    """Of DeepSeek V4. What projects outputs in groups is not among them: PEFT cannot run a LoRA on it."""
    at, hidden, dim = family_of(config.family).names.attention, config.hidden_size, config.head_dim
    pooled = tuple(rate > 0 for rate in shape.rates)
    every = tuple(rate and not chosen for rate, chosen in zip(pooled, shape.chosen, strict=True))

    def pool(attribute: str, name: str, width: int, layers: tuple[bool, ...]) -> Site:
        modules = (f"{at}{name}{deepseek_v4.VALUES}", f"{at}{name}{deepseek_v4.GATES}")
        return Site(f"{attribute}.linear", modules, (width, width), hidden, layers=layers, further=True)

    of: dict[str, Any] = {"layers": shape.chosen, "further": True}
    index = f"{at}{deepseek_v4.INDEXER}"
    scores = (f"{index}{deepseek_v4.INDEX_WEIGHTS}",)
    return (
        Site("inputs", (f"{at}{deepseek_v4.INPUTS}", f"{at}{deepseek_v4.KEY}"), (shape.query_rank, dim), hidden),
        Site("query_up", (f"{at}{deepseek_v4.QUERY_UP}",), (config.num_heads * dim,), shape.query_rank),
        Site("output", (f"{at}{deepseek_v4.OUTPUT}",), (hidden,), shape.output_groups * shape.output_rank),
        pool("pool", deepseek_v4.POOL, 2 * dim, shape.chosen),
        pool("pool", deepseek_v4.POOL, dim, every),
        pool("indexer.pool", deepseek_v4.INDEXER, 2 * shape.index_dim, shape.chosen),
        Site("indexer.queries", (f"{index}{deepseek_v4.QUERY_UP}",), (shape.index_heads * shape.index_dim,),
             shape.query_rank, **of),
        Site("indexer.head_weights", scores, (shape.index_heads,), hidden, **of),
    )  # fmt: skip


def _latent_sites(config: ModelConfig, experts: bool) -> tuple[Site, ...]:
    latent = config.latent
    if latent is None or not experts:
        return ()
    module = (f"{family_of(config.family).names.attention}kv_b_proj",)
    at: dict[str, Any] = {"further": True, "experts": config.num_heads, "layers": _with_latents(config)}
    return (
        Site(LATENT_KEYS, module, (latent.rank,), latent.plain, heads="keys", **at),
        Site(LATENT_VALUES, module, (latent.value,), latent.rank, heads="values", **at),
    )


def _with_latents(config: ModelConfig) -> tuple[bool, ...] | None:
    """Which layers attend over latents; None: all."""
    return None if config.delta is None else tuple(not recurrent for recurrent in config.delta.layers)


def _channel_delta_sites(delta: DeltaConfig, prefix: str, hidden: int) -> tuple[Site, ...]:
    heads, dim = delta.k_heads, delta.k_dim

    def site(attribute: str, parts: dict[str, int], inputs: int) -> Site:
        modules = tuple(prefix + part for part in parts)
        return Site(attribute, modules, tuple(parts.values()), inputs, layers=delta.layers, further=True)

    return (
        site(DELTA_MIX, dict.fromkeys(QUERY_KEY_VALUE, heads * dim), hidden),
        site(DELTA_GATES, {RATE: heads, DECAY_DOWN: dim, GATE_DOWN: dim}, hidden),
        site(DELTA_DECAYS, {DECAY_UP: heads * dim}, dim),
        site(DELTA_OUTPUT_GATES, {GATE_UP: heads * dim}, dim),
        site(DELTA_OUTPUT, {OUT_OF_CHANNELS: hidden}, heads * dim),
    )


def _delta_sites(delta: DeltaConfig, hidden: int) -> tuple[Site, ...]:
    values = delta.v_heads * delta.v_dim
    channels = 2 * delta.k_heads * delta.k_dim + values
    projections = (
        {"in_proj_qkvz": channels + values} if delta.grouped else {"in_proj_qkv": channels, "in_proj_z": values}
    )
    gates = (
        {"in_proj_ba": 2 * delta.v_heads} if delta.grouped else dict.fromkeys(("in_proj_b", "in_proj_a"), delta.v_heads)
    )
    at: dict[str, Any] = {"layers": delta.layers, "further": True}

    def names(parts: Iterable[str]) -> tuple[str, ...]:
        return tuple(f"{_DELTA}{part}" for part in parts)

    return (
        Site(DELTA_MIX, names(projections), tuple(projections.values()), hidden, **at),
        Site(DELTA_GATES, names(gates), tuple(gates.values()), hidden, **at),
        Site(DELTA_OUTPUT, names(("out_proj",)), (hidden,), values, **at),
    )


def _dense_sites(config: ModelConfig) -> tuple[Site, ...]:
    moe, names = config.moe, family_of(config.family).names
    if config.ffn_sizes:
        sites: list[Site] = []
        for width in config.ffn_kinds or dict.fromkeys(config.ffn_sizes):
            own = tuple(width == each for each in config.ffn_sizes)
            sites += _gated(config, "", names.mlp, width, layers=own)
        return tuple(sites)
    layers = None if moe is None else tuple(not has_experts for has_experts in moe.layers)
    if config.only:
        dense = (True,) * config.num_layers if layers is None else layers
        layers = tuple(part == "feed_forward" and own for part, own in zip(config.only, dense, strict=True))
    return _gated(config, "", names.mlp, config.ffn_size, layers=layers)


def _gated(config: ModelConfig, prefix: str, at: str, ffn: int, **more: Any) -> tuple[Site, Site]:
    names, hidden = family_of(config.family).names, config.hidden_size
    gate_up = tuple(at + part for part in _parts(config, names.gate_up))
    fused = names.fused_gate_up and at + names.fused_gate_up
    return (
        Site(f"{prefix}gate_up", gate_up, (ffn,) * len(gate_up), hidden, fused, gated=_gates(config), **more),
        Site(f"{prefix}down", (at + names.down,), (hidden,), ffn, **more),
    )


def _gates(config: ModelConfig) -> bool:
    """See `Site.gated`."""
    return has_gate(config.activation) and not isinstance(config.activation, ClampedSwiglu)


def _parts(config: ModelConfig, gate_up: tuple[str, str]) -> tuple[str, ...]:
    return gate_up if has_gate(config.activation) else gate_up[1:]


def _expert_sites(config: ModelConfig, experts: bool) -> tuple[Site, ...]:
    moe, hidden = config.moe, config.hidden_size
    if moe is None:
        return ()
    names = family_of(config.family).names
    at: dict[str, Any] = {"layers": moe.layers, "further": True}
    routers = tuple(f"{block}{name}" for block in _BLOCKS for name in ("gate", "router"))
    sites = [Site(ROUTER, (names.moe + names.router,), (moe.experts,), hidden, aliases=routers, **at)]
    if moe.shared_ffn_size:
        sites += _gated(config, SHARED, names.moe + names.shared_expert, moe.shared_ffn_size, **at)
    if moe.shared_gate:
        sites.append(Site(SHARED_GATE, (names.moe + names.shared_gate,), (1,), hidden, **at))
    outer = moe.latent or hidden
    if moe.latent:
        into, out = (names.moe + name for name in names.expert_latents)
        sites += Site(LATENT_IN, (into,), (outer,), hidden, **at), Site(LATENT_OUT, (out,), (hidden,), outer, **at)
    if experts:
        at["experts"] = moe.experts
        stored = names.expert_stacks or ("", "")
        # Where a stack is transposed, gpt-oss says so.
        turned = names.stacked_experts and not names.interleaved_gate_up
        up, down = (
            Stack((*(f"{block}experts.{name}" for block in _BLOCKS), f"{own}.weight"), interleaved, turned)
            for name, own, interleaved in (
                ("gate_up_proj" if has_gate(config.activation) else "up_proj", stored[0], names.interleaved_gate_up),
                ("down_proj", stored[1], False),
            )
        )
        one = f"{names.moe}experts.{ANY}."
        gate_up = tuple(one + part for part in _parts(config, names.expert_gate_up))
        sites += (
            Site(EXPERT_GATE_UP, gate_up, (moe.ffn_size,) * len(gate_up), outer, stack=up, gated=_gates(config), **at),
            Site(EXPERT_DOWN, (one + names.expert_down,), (outer,), moe.ffn_size, stack=down, **at),
        )
    return tuple(sites)
