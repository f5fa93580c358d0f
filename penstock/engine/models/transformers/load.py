"""From a checkpoint folder to a `TransformersDecoder`: read by the library, its linears replaced by the engine's, its
attention surveyed, and the result compared with what the library computes alone."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.backends.interface import HeadLayout
from penstock.engine.models.decoder import DecoderLayer
from penstock.engine.models.layers.factory import LayerFactory
from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.models.transformers.attention import (
    CALLS,
    PAGED,
    SURVEYED,
    HeadPart,
    PagedCalls,
    Site,
    cached_dim,
)
from penstock.engine.models.transformers.body import Body, CannotDivide, Junction, StageBody, WholeBody, take_out
from penstock.engine.models.transformers.comparison import Comparison, refusal
from penstock.engine.models.transformers.config import check_custom_code
from penstock.engine.models.transformers.cuts import Cuts, Shard
from penstock.engine.models.transformers.decoder import CachedLayer, ModelHead, TransformersDecoder
from penstock.engine.models.transformers.experts import divide_experts, find_experts, has_experts
from penstock.engine.models.transformers.hidden import HiddenStates, PackedPass, SequencePass, TokenPass
from penstock.engine.models.transformers.interface import register, use
from penstock.engine.models.transformers.linears import (
    EngineLinear,
    ModuleWeights,
    await_linears,
    replace_linears,
    shapes_by_layer,
)
from penstock.engine.models.transformers.read import Reduce, read_model
from penstock.engine.models.transformers.shards import CLOSE, find_cuts
from penstock.engine.models.transformers.survey import TOKENS, Survey
from penstock.engine.models.weights import Quantizer, WeightReader, Weights
from penstock.errors import CheckpointError, ConfigError, ReplicaLost

log = logging.getLogger(__name__)

_NOT_OF_THE_MODEL = (KeyboardInterrupt, MemoryError, torch.OutOfMemoryError, CannotDivide, ReplicaLost)
"""Raised in a pass, these say nothing of whether the engine's attention fits the model."""


class Way(Enum):
    """How shards divide a model: the first that gives what the model does is taken."""

    PAGED = "the engine's attention"
    OWN = "attention of their own"
    WHOLE = "nothing divided"


class _PartsDiffer(Exception):
    """What shards compute together is not the model's."""


def load_decoder(
    folder: Path,
    config: ModelConfig,
    raw: dict[str, Any],
    backend: LayerFactory,
    *,
    dtype: torch.dtype,
    max_positions: int,
    quantize: Quantizer | None = None,
    stored: Weights | None = None,
    custom_code: tuple[str, ...] = (),
    span: tuple[int, int] | None = None,
    shard: Shard | None = None,
    alone: bool = False,
    experts: bool = False,
    progress: Callable[[float], None] | None = None,
) -> TransformersDecoder:
    """Read every weight once. `stored`: the checkpoint where it has weights in few bits; the library gets their values,
    and linears are made of them as they are stored. `custom_code`: the checkpoints whose own code may run. `span`: the
    layers of this stage, where other ranks have others. `shard`: of several that have a part of each layer. `alone`: in
    deterministic mode, tokens are computed one by one. `experts`: it must have some that shards divide."""
    report = progress or (lambda fraction: None)
    log.warning(
        "%s models have no family here: this one runs through transformers, exactly but slower than a family would",
        config.family,
    )
    trusted = check_custom_code(raw, folder, custom_code)

    load = partial(
        _read_and_load, folder, config, raw, backend, dtype, max_positions, quantize, stored, trusted, span, shard
    )
    for cut in (Way.PAGED, Way.OWN):
        try:
            return load(alone, experts, report, cut=cut)
        except _PartsDiffer as error:
            log.warning("tensor_parallel: %s models cannot be divided with %s: %s", config.family, cut.value, error)
    log.warning("tensor_parallel: every shard has this %s model whole", config.family)
    return load(alone, experts, report, cut=Way.WHOLE)


def _read_and_load(
    folder: Path,
    config: ModelConfig,
    raw: dict[str, Any],
    backend: LayerFactory,
    dtype: torch.dtype,
    max_positions: int,
    quantize: Quantizer | None,
    stored: Weights | None,
    trusted: bool,
    span: tuple[int, int] | None,
    shard: Shard | None,
    alone: bool,
    experts: bool,
    report: Callable[[float], None],
    *,
    cut: Way,
) -> TransformersDecoder:
    staged = span is not None or shard is not None
    junction = Junction(span or (0, config.num_layers), config.num_layers)
    try:
        reduce: list[Reduce] = []
        if span is not None:
            reduce.append(lambda model: take_out(model, junction, dtype))
        # What the checkpoint has in few bits is read from it; the rest stays as the library has it. Shards cut values.
        as_stored = None
        if stored is not None and shard is None:
            as_stored = reader = WeightReader(stored, backend, dtype, quantize)
            reduce.append(lambda model: await_linears(model, reader))
        model = read_model(folder, config.family, dtype, trusted, stored, reduce)
        report(0.5)
        if getattr(model, "_is_stateful", False):
            raise refusal(config, "its layers keep a state other than keys and values")
        base_name = model.base_model_prefix
        base: Any = getattr(model, base_name, None)
        if not isinstance(base, nn.Module) or base is model:
            raise refusal(config, f"{type(model).__name__} does not keep its layers apart from its head")
        body: Body = WholeBody(base, config.vocab_size)
        if staged:
            junction.shapes = junction.shapes or shapes_by_layer(model)
            body = StageBody(base, junction, config.hidden_size, dtype)
        return _load(
            model,
            body,
            config,
            raw,
            backend,
            dtype,
            max_positions,
            quantize,
            as_stored,
            staged,
            shard,
            alone,
            experts,
            report,
            cut=cut,
        )
    except CannotDivide as error:
        raise refusal(config, f"{error}, so it has no parts for several ranks") from error


def _load(
    model: Any,
    body: Body,
    config: ModelConfig,
    raw: dict[str, Any],
    backend: LayerFactory,
    dtype: torch.dtype,
    max_positions: int,
    quantize: Quantizer | None,
    as_stored: WeightReader | None,
    staged: bool,
    shard: Shard | None,
    alone: bool,
    experts: bool,
    report: Callable[[float], None],
    *,
    cut: Way,
) -> TransformersDecoder:
    """The decoder of a model that the library has read."""
    device = backend.device
    if shard is None:
        model.to(device)
    head_name = next((name for name, module in model.named_modules() if module is model.get_output_embeddings()), "")
    # Rounded linears change the logits, and some are not there yet; without them the comparison covers the linears
    # too. Shards are compared with the whole in any case.
    rounds = getattr(quantize, "few_bits", quantize) is not None
    late = as_stored is not None or (rounds and shard is None)
    at = device if shard is None else torch.device("cpu")
    comparison = None if late else _compared(model, body, config, at)
    cuts = None
    if shard is not None:
        if experts and not has_experts(body.base, config.num_layers):
            raise ConfigError("expert_parallel: this model has no experts that could be divided; leave it out")
        cuts = _cuts(model, body, config, shard, dtype, cut, alone=alone)
    modules = ModuleWeights(model, raw, None if cuts is None else cuts.apply)
    reader = WeightReader(modules, backend, dtype, quantize if as_stored is None else None)
    linears = replace_linears(model, reader, modules, head_name, as_stored, cuts)
    if cuts is not None and shard is not None:
        divide_experts(model, cuts)
        model.to(device)
        shard.agree(0)  # what follows is summed over shards: one that has failed would be waited for
    comparison = comparison or _compared(model, body, config, device)
    head_linear = next((linear for linear in linears if linear.name == head_name), None)
    head = ModelHead(model, model.base_model_prefix, None if head_linear is None else head_linear.linear, alone=alone)
    report(0.8)

    def check(hidden: HiddenStates) -> None:
        comparison.check(hidden, None if staged else head, dtype, device, rounded=rounds)

    differs: CheckpointError | None = None
    try:
        hidden = _first_that_fits(body, config, backend, dtype, check, alone=alone, cuts=cuts)
        if cuts is not None and cuts.experts and cuts.shard.exchange and not isinstance(hidden, PackedPass):
            # Sequence by sequence, shards would not meet at the same experts.
            raise refusal(config, "it does not run with the engine's attention")
    except CheckpointError as error:
        if shard is None or cut is Way.WHOLE:
            raise
        differs = error
    if shard is not None and cut is not Way.WHOLE:
        failed = shard.any([differs is not None])[0]
        if not shard.agree(int(not failed)):  # all ranks try again, or none
            raise _PartsDiffer(str(differs or "another rank's part differs")) from differs
    embedding = _embedding_of(body.base, device, dtype)
    report(1.0)
    stage = body if isinstance(body, StageBody) else None
    return TransformersDecoder(
        config=_found(config, hidden.sites, (0, config.num_layers) if stage is None else stage.junction.span),
        ops=backend.ops,
        embedding=embedding.detach(),
        layers=_layers(hidden.sites, linears, head_name, backend),
        final_norm=embedding.new_empty(0),
        head=head,
        max_positions=max_positions,
        hidden=hidden,
        linears=linears,
        other_bytes=_other_bytes(body.base),
        stage=stage,
        cuts=cuts,
        final_width=config.hidden_size if head_linear is None else head_linear.in_features,
    )


def _cuts(
    model: Any, body: Body, config: ModelConfig, shard: Shard, dtype: torch.dtype, cut: Way, *, alone: bool
) -> Cuts:
    """What this shard has of a model that is still whole."""
    if cut is Way.WHOLE:
        return Cuts(shard)
    if shard.exchange is None:
        cuts = find_cuts(model, body, config.family, config.num_layers, shard, dtype, paged=cut is Way.PAGED)
    else:  # layers are whole, and experts too where shards would not meet at them
        cuts = Cuts(shard)
        if cut is Way.OWN or alone:
            log.warning("attention_parallel: every shard has the experts of this %s model whole", config.family)
            return cuts
        shard.agree(0)
    cuts.experts = find_experts(model, shard, config.family, CLOSE[dtype])
    return cuts


def _compared(model: Any, body: Body, config: ModelConfig, device: torch.device) -> Comparison:
    if isinstance(body, StageBody):
        body.find_form(body.sample(TOKENS, device))
    return Comparison(model, body, config, device)


def _found(config: ModelConfig, sites: list[Site], span: tuple[int, int]) -> ModelConfig:
    """The configuration with what was found of attention: windows, of other stages' layers none."""
    windows = tuple(site.heads.window for site in sites)
    behind = config.num_layers - span[1]
    return replace(config, windows=((None,) * span[0] + windows + (None,) * behind))


def _first_that_fits(
    body: Body,
    config: ModelConfig,
    backend: LayerFactory,
    dtype: torch.dtype,
    check: Callable[[HiddenStates], None],
    *,
    alone: bool = False,
    cuts: Cuts | None = None,
) -> HiddenStates:
    """How the model's hidden states are computed: with the engine's attention, or else with the model's own. Shards
    that divide heads have settled which."""
    base = body.base
    heads = {} if cuts is None else cuts.heads
    settled = None if cuts is None or not heads else cuts.paged
    takes_positions = "position_ids" in signature(base.forward).parameters
    reason = "it does not take positions"
    if takes_positions and settled is not False:
        try:
            packed = _packed(body, config, backend, heads)
            hidden: HiddenStates = TokenPass(packed) if alone else packed
            check(hidden)
            return hidden
        except _NOT_OF_THE_MODEL:
            raise
        except Exception as error:
            reason = str(error)
            if settled:
                raise refusal(config, reason) from error
    use(base, "eager")
    log.warning(
        "%s: sequences run one after the other with the model's own attention, since ours does not fit (%s)",
        config.family,
        reason,
    )
    begin, _ = own_layers(body, config)
    whole = _cached_sites(body, config, backend.device, takes_positions)
    sites = [site.divided(heads.get(index)) for index, site in enumerate(whole)]
    by_sequence = SequencePass(body, sites, takes_positions, dtype, backend.device, begin)
    check(by_sequence)
    return by_sequence


def own_layers(body: Body, config: ModelConfig) -> tuple[int, int]:
    """The layers that this process has."""
    return body.junction.span if isinstance(body, StageBody) else (0, config.num_layers)


def _packed(body: Body, config: ModelConfig, backend: LayerFactory, heads: Mapping[int, HeadPart]) -> PackedPass:
    """With the engine's attention, wherever the model calls it."""
    device, base = backend.device, body.base
    register()
    survey = Survey({module: name for name, module in base.named_modules()}, config.family)
    use(base, SURVEYED)
    token = CALLS.set(survey)
    try:
        body(
            body.sample(TOKENS, device), position_ids=torch.arange(TOKENS, device=device).unsqueeze(0), use_cache=False
        )
    finally:
        CALLS.reset(token)
    if not survey.sites:
        raise refusal(config, "it is not on the library's attention interface")
    _check_layers(config, len({site.module for site in survey.sites}), own_layers(body, config))
    use(base, PAGED)
    sites = [site.divided(heads.get(call)) for call, site in enumerate(survey.sites)]
    return PackedPass(body, sites, PagedCalls(sites, backend.ops, device))


def _cached_sites(body: Body, config: ModelConfig, device: torch.device, takes_positions: bool) -> list[Site]:
    """What a model with attention of its own keeps, as seen in a cache of the library's."""
    library: Any = import_module("transformers.cache_utils")
    cache = library.DynamicCache()
    positions = {"position_ids": torch.arange(TOKENS, device=device).unsqueeze(0)} if takes_positions else {}
    try:
        body(body.sample(TOKENS, device), past_key_values=cache, use_cache=True, **positions)
    except _NOT_OF_THE_MODEL:
        raise
    except Exception as error:
        raise refusal(config, f"it does not run with a cache of keys and values ({error})") from error
    begin, end = own_layers(body, config)
    _check_layers(config, len(cache.layers) - begin, (begin, end))
    sites = []
    for index, layer in enumerate(cache.layers[begin:], start=begin):
        if type(layer) is not library.DynamicLayer or layer.keys is None or layer.keys.dim() != 4:
            raise refusal(config, f"layer {index} keeps something other than keys and values")
        (_, heads, tokens, key_dim), (_, value_heads, _, value_dim) = layer.keys.shape, layer.values.shape
        if tokens != TOKENS or heads != value_heads:
            raise refusal(config, f"layer {index} does not keep one key and one value for every token")
        layout = HeadLayout(heads=heads, kv_heads=heads, head_dim=cached_dim(key_dim, value_dim), scale=1.0)
        sites.append(Site(str(index), layout, key_dim, value_dim))
    return sites


def _check_layers(config: ModelConfig, attending: int, span: tuple[int, int]) -> None:
    if attending != span[1] - span[0]:
        raise refusal(
            config,
            f"{attending} of its {span[1] - span[0]} layers attend to keys and values; what the others keep of earlier "
            "tokens is not known",
        )


def _layers(sites: list[Site], linears: list[EngineLinear], head: str, backend: LayerFactory) -> list[DecoderLayer]:
    """One entry for every attention call, with the linears of its layer; the first call of a layer has them."""
    by_layer: dict[int, list[Linear]] = {}
    for linear in linears:
        if linear.name != head:
            by_layer.setdefault(linear.layer or 0, []).append(linear.linear)
    nothing = torch.empty(0)
    layers: list[DecoderLayer] = []
    for site in sites:
        at = layer_of(site.module)
        mine = tuple(by_layer.pop(len(layers) if at is None else at, ()))
        mixer = CachedLayer(backend.ops, site.heads, mine)
        rest = CachedLayer(backend.ops, site.heads, ())
        layers.append(DecoderLayer(nothing, mixer, nothing, rest))
    return layers


def _embedding_of(base: nn.Module, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The embedding of tokens, as far as it can be told: the engine asks for its type and device."""
    tables = (module.weight for module in base.modules() if isinstance(module, nn.Embedding))
    found: Tensor | None = next(tables, None)
    return torch.empty(0, dtype=dtype, device=device) if found is None else found


def layer_of(name: str) -> int | None:
    """The number of the layer that a module is in, from its name."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return None if found is None else int(found[1])


def _other_bytes(base: nn.Module) -> int:
    embeddings = {id(module.weight) for module in base.modules() if isinstance(module, nn.Embedding)}
    return sum(p.nbytes for p in base.parameters() if p.dim() > 1 and id(p) not in embeddings)
