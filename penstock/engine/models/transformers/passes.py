"""Which pass computes the hidden states of a model of the `transformers` library: one with the engine's attention, or
one with the model's own. The first whose result is the library's is taken, the same by all shards of a stage."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any

import torch

from penstock.engine.backends.interface import HeadLayout
from penstock.engine.models.layers.factory import LayerFactory
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
from penstock.engine.models.transformers.body import Body, CannotDivide, StageBody
from penstock.engine.models.transformers.comparison import refusal
from penstock.engine.models.transformers.cuts import Cuts
from penstock.engine.models.transformers.hidden import HiddenStates, PackedPass, SequencePass, TokenPass
from penstock.engine.models.transformers.interface import register, use
from penstock.engine.models.transformers.memory import CannotKeep, Memory, find_memory
from penstock.engine.models.transformers.stateful import StatefulPass
from penstock.engine.models.transformers.survey import TOKENS, Survey
from penstock.errors import CheckpointError, ReplicaLost

log = logging.getLogger(__name__)

_STATES = ("mamba", "linear", "recurrent", "conv", "ssm", "rwkv", "hybrid")
"""In `layer_types`: layers that keep something other than keys and values."""

_NOT_OF_THE_MODEL = (KeyboardInterrupt, MemoryError, torch.OutOfMemoryError, CannotDivide, ReplicaLost)
"""Raised in a pass, these say nothing of whether the engine's attention fits the model."""


def first_that_fits(
    body: Body,
    config: ModelConfig,
    backend: LayerFactory,
    dtype: torch.dtype,
    check: Callable[[HiddenStates], None],
    *,
    alone: bool = False,
    cuts: Cuts | None = None,
) -> HiddenStates:
    """How the model's hidden states are computed; `check` raises where they are not the library's. Shards that divide
    heads have settled which attention it is with."""
    heads = {} if cuts is None else cuts.heads
    settled = None if cuts is None or not heads else cuts.paged
    takes_positions = "position_ids" in signature(body.base.forward).parameters
    memory = None if isinstance(body, StageBody) else _memory(body, config, backend.device)
    if memory is not None:
        return _stateful(body, memory, config, backend, dtype, check, positions=takes_positions, alone=alone)
    hidden: HiddenStates | None = None
    reason, refused = "it does not take positions", False
    if settled is False:
        reason = "shards could not divide its heads that way"
    elif takes_positions:
        try:
            packed = _packed(body, config, backend, heads)
            hidden = TokenPass(packed) if alone else packed
            check(hidden)
        except _NOT_OF_THE_MODEL:
            raise
        except Exception as error:
            hidden, reason, refused = None, str(error), isinstance(error, CheckpointError)
    if hidden is None:
        log.warning("%s: the engine's attention does not fit this model (%s)", config.family, reason)
    if cuts is not None:
        # In a pass shards wait for each other's sums: all take the same.
        cuts.shard.agree(0)
        if cuts.shard.any([hidden is None])[0] and hidden is not None:
            hidden, reason = None, "it does not fit on another shard"
    if hidden is not None:
        return hidden
    if settled:
        raise CheckpointError(reason) if refused else refusal(config, reason)
    use(body.base, "eager")
    log.warning("%s: sequences run one after the other with the model's own attention", config.family)
    begin, _ = own_layers(body, config)
    whole = _cached_sites(body, config, backend.device, takes_positions)
    sites = [site.divided(heads.get(index)) for index, site in enumerate(whole)]
    by_sequence = SequencePass(body, sites, takes_positions, dtype, backend.device, begin)
    check(by_sequence)
    return by_sequence


def keeps_states(model: Any) -> bool:
    """Whether a model says that its layers keep states other than keys and values."""
    if getattr(model, "_is_stateful", False):
        return True
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    return any(state in str(kind) for kind in kinds for state in _STATES)


def _memory(body: Body, config: ModelConfig, device: torch.device) -> Memory | None:
    """How the model keeps states; None where it has keys and values only."""
    if not keeps_states(body.base):
        return None
    use(body.base, "eager")
    try:
        return find_memory(body.base, partial(body.sample, device=device))
    except _NOT_OF_THE_MODEL:
        raise
    except CannotKeep as error:
        raise refusal(config, str(error)) from error
    except Exception as error:  # whatever the library's code does with so few tokens
        what = f"{type(error).__name__}: {error}"
        raise refusal(config, f"what it keeps of earlier tokens could not be found ({what})") from error


def _stateful(
    body: Body,
    memory: Memory,
    config: ModelConfig,
    backend: LayerFactory,
    dtype: torch.dtype,
    check: Callable[[HiddenStates], None],
    *,
    positions: bool,
    alone: bool,
) -> HiddenStates:
    """For models that keep states."""
    log.warning("%s: its layers keep states: sequences run one after the other", config.family)
    tokens = partial(body.sample, device=backend.device)
    reason = "they begin anew with several"
    for continues in (True, False):
        try:
            if continues and not memory.continues(tokens, positions):
                continue
            found = StatefulPass(body, memory, positions, dtype, backend.device, continues=continues, alone=alone)
            check(found)
        except _NOT_OF_THE_MODEL:
            raise
        except Exception as error:
            if not continues:
                if isinstance(error, CheckpointError):
                    raise
                raise refusal(config, str(error)) from error
            reason = str(error)
            continue
        if not continues:
            log.warning(
                "%s: its layers compute one token at a time behind a state (%s): prompts that do not fit one step are "
                "slow behind their first chunk",
                config.family,
                reason,
            )
        return found
    raise AssertionError("the last attempt returns or raises")


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
