"""The grid of ranks and which part of a model each of them holds.

`pipeline` stages of `tensor` shards each; rank = stage * tensor + shard. A shard has every `tensor`-th part of each
layer's heads and of its feed-forward width; a stage has a run of consecutive layers. A model that the grid does
not split evenly is refused, with the sizes that would work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.engine.models.model_config import ModelConfig
from penstock.engine.models.stage_config import Carried, StageConfig
from penstock.engine.parallel.placement import place, slots_per_shard
from penstock.errors import ConfigError

Span = tuple[int, int]
"""First and one past the last."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one rank in the grid."""

    rank: int
    tensor: int
    pipeline: int
    data: bool = False
    """Shards have whole layers, but for the experts, and attend each over sequences of their own."""

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline

    @property
    def stage(self) -> int:
        return self.rank // self.tensor

    @property
    def shard(self) -> int:
        return self.rank % self.tensor

    @property
    def first(self) -> bool:
        """In the stage that has the embedding and the head."""
        return self.stage == 0

    @property
    def cut(self) -> Span:
        """Which part of a layer's heads and widths it has, of how many."""
        return (0, 1) if self.data else (self.shard, self.tensor)

    def __str__(self) -> str:
        return f"rank {self.rank} (shard {self.shard} of {self.tensor}, stage {self.stage} of {self.pipeline})"


def place_experts(model: ModelConfig, shards: int, copies: int) -> ModelConfig:
    """The model with its experts whole on shards, `copies` more on each than its part of them."""
    moe = model.moe
    if moe is None:
        raise ConfigError("expert_parallel: this model has no experts; leave it out")
    if shards == 1:
        raise ConfigError("expert_parallel: experts are spread over tensor_parallel devices; there is only one")
    if shards > moe.experts:
        raise ConfigError(f"expert_parallel: {shards} devices are more than the {moe.experts} experts of a layer")
    table = place([1.0] * moe.experts, shards, slots_per_shard(moe.experts, shards, copies))
    return dataclasses.replace(model, moe=dataclasses.replace(moe, placement=(table,) * model.num_layers))


def check_layout(model: ModelConfig, tensor: int, pipeline: int, data: bool = False) -> None:
    """Raise `ConfigError` when the model cannot be split like that."""
    # What the library runs is divided as far as that goes (`models.transformers.shards`).
    if not data and not model.by_transformers and not splits(model, tensor):
        possible = [size for size in range(1, model.num_heads + 1) if splits(model, size)]
        choosing = 0 if model.sparse_blocks is None else model.sparse_blocks.heads
        heads = named_heads((model.num_heads, *model.query_heads), model.num_kv_heads, choosing)
        raise ConfigError(
            f"tensor_parallel: {tensor} cannot split {heads}{named_width(_widths(model), tensor)} evenly; this model "
            f"allows {', '.join(map(str, possible))}"
        )
    if pipeline > model.num_layers:
        raise ConfigError(f"pipeline_parallel: {pipeline} is more than the {model.num_layers} layers of this model")
    if pipeline > 1 and model.cycles is not None:
        raise ConfigError(
            "pipeline_parallel: layers of this model run several times for each token, so that it has no stages; use "
            "tensor_parallel"
        )
    if model.stage_starts and pipeline > sum(model.stage_starts):
        with_one = "with an indexer" if model.delta is None else "with an indexer or a delta net"
        raise ConfigError(
            f"pipeline_parallel: {pipeline} stages are more than the {sum(model.stage_starts)} layers {with_one} "
            "behind which no layer attends to latents of those before; the others attend to what a layer before them "
            "chose or keeps, so that no stage begins with them"
        )


def named_heads(heads: Sequence[int], kv_heads: int, choosing: int) -> str:
    """What shards cannot divide. `choosing`: heads of indexers that choose for KV heads; 0: there are none."""
    several = " and ".join(map(str, sorted({*heads}, reverse=True)))
    return f"{several} heads over {kv_heads} KV heads" + (f" with {choosing} index heads" if choosing else "")


def named_width(widths: Sequence[tuple[str, int]], tensor: int) -> str:
    """The first of the widths that shards cannot divide, as the end of a list."""
    return next((f" and {name} of {width}" for name, width in widths if width % tensor), "")


def mixer_widths(*, key_heads: int, mamba_heads: int, channels: int, output_groups: int) -> list[tuple[str, int]]:
    """What shards must divide of token mixers beside attention heads; 0: a model has none."""
    return [
        ("a number of delta nets' key heads", key_heads),
        ("a number of Mamba heads", mamba_heads),
        ("a number of convolution channels", channels),
        ("a number of output groups", output_groups),
    ]


def _widths(model: ModelConfig) -> list[tuple[str, int]]:
    """What shards must divide beside heads."""
    widths = [("a feed-forward width", width) for width in (model.ffn_size, *model.ffn_sizes)]
    if model.moe is not None:
        cut = [] if model.moe.placement else [("an expert width", model.moe.ffn_size)]
        # Without a dense layer nothing has the dense width.
        widths = cut if all(model.moe.layers) else [*widths[:1], *cut]
        widths.append(("a shared expert's width", model.moe.shared_ffn_size))
    return widths + mixer_widths(
        key_heads=0 if model.delta is None else model.delta.k_heads,
        mamba_heads=0 if model.mamba is None else model.mamba.heads,
        channels=0 if model.short_conv is None else model.short_conv.channels,
        output_groups=0 if model.compression is None else model.compression.output_groups,
    )


def splits(model: ModelConfig, tensor: int) -> bool:
    """Whether each of `tensor` shards can have an equal part of every layer."""
    # With more shards than KV heads each shard has one, and several shards have the same.
    kv_heads = {model.num_kv_heads, *(heads for heads, _ in model.layer_heads)}
    kv_fits = all(heads % tensor == 0 or tensor % heads == 0 for heads in kv_heads)
    if model.mamba is not None:
        mamba = model.mamba
        # As with KV heads: with more shards than groups several shards have the same one.
        kv_fits = kv_fits and (mamba.groups % tensor == 0 or tensor % mamba.groups == 0)
        runs = mamba.norm_groups
        kv_fits = kv_fits and (not runs or runs % tensor == 0 or (tensor % runs == 0 and mamba.gate_first))
    if model.sparse_blocks is not None:
        choosing = model.sparse_blocks.heads
        kv_fits = kv_fits and (choosing % tensor == 0 or tensor % choosing == 0)
    even = (model.num_heads, *model.query_heads, *(width for _, width in _widths(model)))
    return kv_fits and all(width % tensor == 0 for width in even)


def layer_span(layers: int, place: Place, starts: Sequence[bool] = ()) -> Span:
    """The layers of a stage. Those left over by the division go to the last stages: the first has the head too.
    `starts`: with which layers stages may begin, where not with any; there are as many as stages."""
    begins = [_even_begin(layers, place.pipeline, stage) for stage in range(place.pipeline)]
    if starts:
        allowed = [layer for layer, may in enumerate(starts) if may]
        for stage, wanted in enumerate(begins[1:], 1):
            left = [layer for layer in allowed if layer > begins[stage - 1]]
            left = left[: len(left) - (place.pipeline - 1 - stage)]  # the others are for later stages
            begins[stage] = min(left, key=lambda layer: abs(layer - wanted))
    ends = [*begins[1:], layers]
    return begins[place.stage], ends[place.stage]


def _even_begin(layers: int, stages: int, stage: int) -> int:
    least, extra = divmod(layers, stages)
    return stage * least + max(0, stage - (stages - extra))


def stage_span(model: ModelConfig, place: Place) -> Span:
    """The layers of the whole model that a stage has."""
    return layer_span(model.num_layers, place, model.stage_starts)


def head_span(model: ModelConfig, place: Place, layer: int | None = None) -> Span:
    """The query heads of a shard. `layer`: where layers differ in them."""
    return even_span(model.num_heads if layer is None else model.queries_in(layer), place)


def kv_head_span(model: ModelConfig, place: Place, kv_heads: int = 0) -> Span:
    """The KV heads that a shard's query heads attend to, however many these are; `kv_heads`: of layers that have
    another number of them."""
    begin, end = head_span(model, place)
    group = model.num_heads // (kv_heads or model.num_kv_heads)
    return begin // group, -(-end // group)


def even_span(size: int, place: Place) -> Span:
    """A shard's part of a width that `tensor` divides."""
    index, parts = place.cut
    part = size // parts
    return index * part, (index + 1) * part


def local_config(model: ModelConfig, place: Place) -> ModelConfig:
    """The model as one rank sees it: its heads, its width, its layers."""
    first, last = stage_span(model, place)
    parts = place.cut[1]
    kv_first, kv_last = kv_head_span(model, place)
    layer_heads = []
    for kv_heads, dim in model.layer_heads[first:last]:
        begin, end = kv_head_span(model, place, kv_heads)
        layer_heads.append((end - begin, dim))
    moe = model.moe
    if moe is not None:
        moe = dataclasses.replace(
            moe,
            ffn_size=moe.ffn_size if moe.placement else moe.ffn_size // parts,
            layers=moe.layers[first:last],
            placement=moe.placement[first:last],
            shard=place.shard,
            shared_ffn_size=moe.shared_ffn_size // parts,
            hashed=moe.hashed[first:last],
            bounds=moe.bounds[first:last],
        )
    delta = model.delta
    if delta is not None:
        delta = dataclasses.replace(
            delta,
            layers=delta.layers[first:last],
            k_heads=delta.k_heads // parts,
            v_heads=delta.v_heads // parts,
        )
    mamba = model.mamba
    if mamba is not None:
        mamba = dataclasses.replace(
            mamba,
            layers=mamba.layers[first:last],
            heads=mamba.heads // parts,
            groups=max(1, mamba.groups // parts),
            norm_groups=max(1, mamba.norm_groups // parts) if mamba.norm_groups else 0,
            norm_shards=max(1, parts // mamba.norm_groups) if mamba.norm_groups else 1,
        )
    short = model.short_conv
    if short is not None:
        short = dataclasses.replace(short, layers=short.layers[first:last], channels=short.channels // parts)
    latent = None if model.latent is None else model.latent.stage(first, last)
    compression = model.compression
    if compression is not None:
        compression = dataclasses.replace(
            compression,
            rates=compression.rates[first:last],
            chosen=compression.chosen[first:last],
            output_groups=compression.output_groups // parts,
        )
    ngrams = model.ngrams
    if ngrams is not None:
        ngrams = dataclasses.replace(ngrams, layers=ngrams.layers[first:last])
    sparse = model.sparse_blocks
    if sparse is not None:
        begin, end = kv_head_span(model, place, sparse.heads)
        sparse = dataclasses.replace(sparse, layers=sparse.layers[first:last], heads=end - begin)
    return dataclasses.replace(
        model,
        num_heads=model.num_heads // parts,
        num_kv_heads=kv_last - kv_first,
        ffn_size=model.ffn_size // parts,
        layer_heads=tuple(layer_heads),
        bounds=model.bounds[first:last],
        query_heads=tuple(heads // parts for heads in model.query_heads[first:last]),
        query_kinds=tuple(heads // parts for heads in dict.fromkeys(model.query_heads)),
        key_sources=_own_sources(model, first, last),
        stage=_stage(model, place),
        ffn_sizes=tuple(width // parts for width in model.ffn_sizes[first:last]),
        ffn_kinds=tuple(width // parts for width in dict.fromkeys(model.ffn_sizes)),
        num_layers=last - first,
        windows=model.windows[first:last],
        unrotated=model.unrotated[first:last],
        layer_ropes=model.layer_ropes[first:last],
        latent=latent,
        moe=moe,
        delta=delta,
        mamba=mamba,
        short_conv=short,
        compression=compression,
        ngrams=ngrams,
        sparse_blocks=sparse,
        only=model.only[first:last],
        tied_embeddings=False,  # the head is cut, the embedding is not
    )


def _own_sources(model: ModelConfig, first: int, last: int) -> tuple[int, ...]:
    """Of a stage's layers, counted from its first one. What an earlier stage has is stored by the first layer that
    attends to it."""
    sources = model.key_sources[first:last]
    return tuple(source - first if source >= first else sources.index(source) for source in sources)


def given_keys(model: ModelConfig, place: Place) -> tuple[int | None, ...]:
    """See `StageConfig.given`."""
    first, last = stage_span(model, place)
    if not model.key_sources:
        return (None,) * (last - first)
    own = enumerate(_own_sources(model, first, last))
    sources = model.key_sources[first:last]
    return tuple(sources[at] if keeper == at and sources[at] < first else None for at, keeper in own)


def _stage(model: ModelConfig, place: Place) -> StageConfig | None:
    if place.pipeline == 1 or not (model.key_sources or model.other_tables or model.ngrams is not None):
        return None
    first, last = stage_span(model, place)
    arrives, leaves = _carried_to(model, first, place), _carried_to(model, last, place)
    return StageConfig(first, arrives, leaves, given_keys(model, place))


def _carried_to(model: ModelConfig, begin: int, place: Place) -> Carried:
    """The stage that begins with layer `begin`, and those behind it."""
    if begin == 0:
        return Carried()
    inputs, keys = model.token_inputs, []
    for source in dict.fromkeys(each for each in model.key_sources[begin:] if each < begin):
        kv_heads, dim = model.heads_in(source)
        kv_first, kv_last = kv_head_span(model, place, kv_heads)
        keys.append((source, (kv_last - kv_first) * dim * (1 if model.shares(source) == "values" else 2)))
    return Carried(
        vectors=(model.num_layers - begin) * inputs.size if inputs is not None else 0,
        keys=tuple(keys),
        tokens=(model.moe is not None and any(model.moe.hashed[begin:]))
        or (model.ngrams is not None and any(one is not None for one in model.ngrams.layers[begin:])),
    )
