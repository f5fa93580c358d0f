"""The linears of a model that adapters may add to: sites of attention, feed-forwards, routers and experts, embedding
and head."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Any

from penstock.engine.adapters.layout import (
    ANY,
    DELTA_DECAYS,
    DELTA_GATES,
    DELTA_MIX,
    DELTA_OUTPUT,
    DELTA_OUTPUT_GATES,
    EMBEDDING,
    EXPERT_DOWN,
    EXPERT_GATE_UP,
    EXPERTS_GATE_IN,
    EXPERTS_GATE_OUT,
    HEAD,
    INDEXER,
    LATENT_IN,
    LATENT_KEYS,
    LATENT_OUT,
    LATENT_VALUES,
    MIXER_GATE_IN,
    MIXER_GATE_OUT,
    ROUTER,
    SHARED,
    SHARED_GATE,
    AdapterLayout,
    Site,
    Stack,
)
from penstock.engine.backends.activation import ClampedSilu, ClampedSwiglu, has_gate
from penstock.engine.models import axk2, deepseek_v4
from penstock.engine.models.attention_config import CompressionConfig, LatentConfig
from penstock.engine.models.families import family_of
from penstock.engine.models.hrm_text import STACKS
from penstock.engine.models.kimi_linear import DECAY_DOWN, DECAY_UP, GATE_DOWN, GATE_UP, QUERY_KEY_VALUE, RATE
from penstock.engine.models.kimi_linear import OUTPUT as OUT_OF_CHANNELS
from penstock.engine.models.latent import INDEX_KEYS, INDEX_QUERIES, INDEX_WEIGHTS
from penstock.engine.models.latent import INDEXER as LATENT_INDEXER
from penstock.engine.models.llama import SPARSE_INDEXER
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.models.recurrence_config import DeltaConfig

_DELTA = "linear_attn."
_BLOCKS = ("mlp.", "block_sparse_moe.", "feed_forward.", "mixer.")
"""What the part of a layer with router and experts is called."""
_GATED_QUERY_UP, _GATE_LINEARS = "q_gate_proj", ("mlp.fc1", "mlp.fc2")
"""What transformers calls linears of A.X K2 that have other names in its files."""


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
    layout = AdapterLayout(sites, config.num_layers, by_output, ends=head_rows != 0, tied=config.tied_embeddings)
    cycles = config.cycles
    if cycles is None:
        return layout
    runs = tuple(cycles.layer_of(run) for run in range(cycles.total))
    return replace(layout, layers=len(STACKS) * cycles.layers, stacks=STACKS, runs=runs)


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
            norm_eps=config.rms_eps if config.normed_embedding else None,
            virtual_factor=None if config.other_tables else config.virtual_scale,
            closed=config.other_tables,
        ),
        Site(HEAD, (HEAD,), (head_rows or vocab,), hidden, further=True, end="head", closed=config.other_tables),
    )


def _attention_sites(config: ModelConfig) -> tuple[Site, ...]:
    if config.heads_differ:
        return _sites_by_heads(config)
    hidden, q_size, kv_size = (
        config.hidden_size,
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
    )
    names, latent = family_of(config.family).names, config.latent
    if latent is not None:
        return _latent_attention_sites(config, latent, q_size)
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
        gates = config.gates_in(0)
        gate = Site("output_gate", (names.attention + names.output_gate,), (gates,), hidden, of_attention=True)
        return *attention, gate
    if (sparse := config.sparse_blocks) is not None:
        at = f"{names.attention}{SPARSE_INDEXER}"
        modules, sizes = (f"{at}q_proj", f"{at}k_proj"), (sparse.heads * sparse.dim, sparse.dim)
        return *attention, Site(INDEXER, modules, sizes, hidden, layers=sparse.layers, further=True)
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


def _latent_attention_sites(config: ModelConfig, latent: LatentConfig, queries: int) -> tuple[Site, ...]:
    names, hidden, narrow = family_of(config.family).names, config.hidden_size, latent.query_rank
    at, values = names.attention, config.num_heads * latent.value
    of: dict[str, Any] = {"of_attention": True, "layers": _with_latents(config)}
    first, size = ("q_proj", queries) if narrow is None else ("q_a_proj", narrow)
    sites = []
    for cached, layers in _latent_kinds(config, latent):
        modules, sizes = (f"{at}{first}", f"{at}kv_a_proj_with_mqa"), (size, cached)
        parts = 2 if cached else 1  # queries alone, where latents are another layer's
        sites.append(Site("inputs", modules[:parts], sizes[:parts], hidden, **{**of, "layers": layers}))
    if narrow is not None and latent.gated_queries:
        aliases = (f"{at}{_GATED_QUERY_UP}",)
        sites.append(Site("query_up", (f"{at}q_b_proj",), (queries + values,), 2 * narrow, aliases=aliases, **of))
    elif narrow is not None:
        sites.append(Site("query_up", (f"{at}q_b_proj",), (queries,), narrow, **of))
    sites.append(Site("output", (at + names.output,), (hidden,), values, **of))
    if config.output_gate:
        sites.append(Site("output_gate", (at + names.output_gate,), (values,), hidden, **of))
    nets = () if config.delta is None else _channel_delta_sites(config.delta, at, hidden)
    return *sites, *nets, *_index_sites(config, latent), *_input_gate_sites(config, latent)


def _latent_kinds(config: ModelConfig, latent: LatentConfig) -> list[tuple[int, tuple[bool, ...] | None]]:
    """What layers make of their inputs to be cached, numbers of a token, and which layers: those of each kind, in one
    order for the whole model and for any stage of it. None: all that have latents."""
    if latent.uniform:
        return [(latent.rank + latent.rotary, _with_latents(config))]
    every = range(config.num_layers)
    made = [0 if latent.shares(layer) else latent.cached_in(layer) for layer in every]
    return [(kind, tuple(one == kind for one in made)) for kind in (latent.rank + latent.rotary, latent.rank, 0)]


def _sites_by_heads(config: ModelConfig) -> tuple[Site, ...]:
    """Of layers that differ in their heads, or in whose keys and values they attend to: those of each kind, in one
    order for the whole model and for any stage of it, which may have no layer of a kind."""
    names, hidden, every = family_of(config.family).names, config.hidden_size, range(config.num_layers)
    kinds = [
        (config.windows[layer] is None, config.projects(layer) == "both", config.queries_in(layer)) for layer in every
    ]
    heads = config.query_kinds or tuple(dict.fromkeys(config.query_heads)) or (config.num_heads,)
    sites: list[Site] = []
    for kind in product((False, True), (False, True) if config.key_sources else (False,), heads):
        found = next((layer for layer in every if kinds[layer] == kind), 0)
        (kv_heads, dim), shared = config.heads_in(found), config.projects(found)
        queries, keys, values = config.queries_in(found) * dim, kv_heads * dim, config.values_in(found)
        parts = {"": 3, "values": 2, "both": 1}[shared]
        modules = tuple(names.attention + part for part in names.qkv)[:parts]
        of: dict[str, Any] = {"of_attention": True, "layers": tuple(own == kind for own in kinds)}
        sites.append(Site("qkv", modules, (queries, keys, values)[:parts], hidden, **of))
        output = names.attention + names.output
        sites.append(Site("output", (output,), (hidden,), config.attended_in(found), **of))
        if config.output_gate:
            gate = names.attention + names.output_gate
            sites.append(Site("output_gate", (gate,), (config.gates_in(found),), hidden, **of))
    return tuple(sites)


def _index_sites(config: ModelConfig, latent: LatentConfig) -> tuple[Site, ...]:
    """Of what chooses the tokens that are attended to; only their order says something, so few adapters touch it."""
    index, at = latent.index, f"{family_of(config.family).names.attention}{LATENT_INDEXER}"
    inputs = config.hidden_size if index is not None and index.normed_inputs else latent.query_rank
    if index is None or inputs is None:
        return ()
    of: dict[str, Any] = {"layers": index.layers, "further": True}
    return (
        Site("indexer.keys", (at + INDEX_KEYS,), (index.dim,), config.hidden_size, **of),
        Site("indexer.queries", (at + INDEX_QUERIES,), (index.heads * index.dim,), inputs, **of),
        Site("indexer.head_weights", (at + INDEX_WEIGHTS,), (index.heads,), config.hidden_size, **of),
    )


def _input_gate_sites(config: ModelConfig, latent: LatentConfig) -> tuple[Site, ...]:
    """Of A.X K2: gates behind the norms before attention and before experts."""
    rank, hidden, names, moe = latent.gate_rank, config.hidden_size, family_of(config.family).names, config.moe
    if not rank:
        return ()

    def gate(attributes: tuple[str, str], norm: str, layers: tuple[bool, ...] | None) -> tuple[Site, Site]:
        (narrow, wide), (first, second), of = attributes, _GATE_LINEARS, {"layers": layers, "further": True}
        into: Any = {**of, "aliases": (f"{norm}.{first}",)}
        out: Any = {**of, "aliases": (f"{norm}.{second}",)}
        return (
            Site(narrow, (f"{norm}.{axk2.GATE_DOWN}",), (rank,), hidden, **into),
            Site(wide, (f"{norm}.{axk2.GATE_UP}",), (hidden,), rank, **out),
        )

    routed = (False,) * config.num_layers if moe is None else moe.layers
    of_mixer = gate((MIXER_GATE_IN, MIXER_GATE_OUT), names.mixer_norm, None)
    return *of_mixer, *gate((EXPERTS_GATE_IN, EXPERTS_GATE_OUT), names.feed_forward_norm, routed)


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
    kinds = [(latent.plain, at["layers"])]
    if latent.unrotated:
        plain = [latent.plain_in(layer) for layer in range(config.num_layers)]
        sizes = (latent.plain, latent.plain + latent.rotary)
        kinds = [(size, tuple(one == size for one in plain)) for size in sizes]
    sites: list[Site] = []
    for size, layers in kinds:
        of = {**at, "layers": layers}
        sites.append(Site(LATENT_KEYS, module, (latent.rank,), size, heads="keys", **of))
        sites.append(Site(LATENT_VALUES, module, (latent.value,), latent.rank, heads="values", **of))
    return tuple(sites)


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
    """See `Site.gated`: of dense feed-forwards and of the expert that all tokens visit."""
    return _unbounded(config) and not any(config.bounds)


def _unbounded(config: ModelConfig) -> bool:
    """Whether a gate has no bounds, behind which a factor of the inputs is another than before them."""
    return has_gate(config.activation) and not isinstance(config.activation, ClampedSwiglu | ClampedSilu)


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
        one, gated = f"{names.moe}experts.{ANY}.", _unbounded(config) and not moe.clamp and not any(moe.bounds)
        gate_up = tuple(one + part for part in _parts(config, names.expert_gate_up))
        sites += (
            Site(EXPERT_GATE_UP, gate_up, (moe.ffn_size,) * len(gate_up), outer, stack=up, gated=gated, **at),
            Site(EXPERT_DOWN, (one + names.expert_down,), (outer,), moe.ffn_size, stack=down, **at),
        )
    return tuple(sites)
