"""The adapters of an engine, as its configuration asks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from penstock.engine.adapters.adaption_prompts import AdaptionBank
from penstock.engine.adapters.apply import FusedLora, adapt
from penstock.engine.adapters.base_tensors import BaseTensors, Stored
from penstock.engine.adapters.base_weights import BaseWeights
from penstock.engine.adapters.folder import (
    MOST_TOKENS,
    changes_experts,
    changes_outputs,
    default_rank,
    input_blocks,
    replaced_rows,
    stored_keys,
    stored_tokens,
    virtual_tokens,
)
from penstock.engine.adapters.head_norms import HeadNormBank, head_norms_in_layer
from penstock.engine.adapters.inputs import InputBank
from penstock.engine.adapters.kinds.modules import layer_of, site_of
from penstock.engine.adapters.layout import LATENT_KEYS, AdapterCut, uncut
from penstock.engine.adapters.library_modules import adapt_modules, cut_of_modules, layout_of_modules
from penstock.engine.adapters.model_sites import layout_of
from penstock.engine.adapters.norm_tensors import NormNames
from penstock.engine.adapters.norms import norms_in_layer, norms_of
from penstock.engine.adapters.peft import LoadedAdapter, read_adapter
from penstock.engine.adapters.pool import AdapterPool
from penstock.engine.adapters.prefixes import PrefixBank, prefix_bytes
from penstock.engine.adapters.rows import RowBank
from penstock.engine.adapters.runtime import AdaptedModel, AdapterRuntime
from penstock.engine.adapters.spec import DEFAULT_SLOTS, name_problem
from penstock.engine.adapters.visits import VisitBank
from penstock.engine.backends.backend import Backend
from penstock.engine.config import EngineConfig
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.families import family_of
from penstock.engine.models.transformers.decoder import TransformersDecoder
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.engine.parallel.launch import Ranks

_FEW_ROWS = 64
"""Rows of embedding and head that slots have room for in any case: those of a few special tokens."""


def slot_count(config: EngineConfig) -> int:
    """Device slots the configuration asks for; 0 turns adapters off."""
    if config.adapter_slots is not None:
        return config.adapter_slots
    return DEFAULT_SLOTS if config.adapters else 0


def adapter_rank(config: EngineConfig) -> int:
    """The largest rank that slots are made for: as configured, or that of the listed adapters that are folders here."""
    if config.adapter_rank is not None:
        return config.adapter_rank
    return default_rank(Path(spec.source).expanduser() for spec in config.adapters)


def with_experts(config: EngineConfig, backend: Backend) -> bool:
    """Whether slots have room for matrices of experts: as configured; else where that takes no memory before there are
    such adapters, or a listed one that is a folder here is one."""
    if config.adapter_experts is not None:
        return config.adapter_experts
    return backend.in_host_memory or any(changes_experts(Path(spec.source).expanduser()) for spec in config.adapters)


def with_vectors(config: EngineConfig) -> bool:
    """Whether slots have room for what adapters do to single outputs and norms, where that is reserved: as configured,
    or where a listed one that is a folder here does that."""
    if config.adapter_vectors is not None:
        return config.adapter_vectors
    return any(changes_outputs(Path(spec.source).expanduser()) for spec in config.adapters)


def beside_slots(config: EngineConfig, backend: Backend, cut: AdapterCut, dtype: torch.dtype) -> int:
    """Bytes that are to stay free for what adapters have beside their slots: as configured, or what the listed ones
    that are folders here need if the largest are in slots together. `cut`: this process's part of the model, `dtype`:
    of its activations."""
    if backend.in_host_memory:
        return 0
    if config.adapter_memory is not None:
        return config.adapter_memory
    folders = [Path(spec.source).expanduser() for spec in config.adapters]
    found = [
        _block_bytes(input_blocks(folder), cut)
        + prefix_bytes(stored_keys(folder), cut, dtype)
        + (_visit_bytes(cut) if changes_experts(folder) and changes_outputs(folder) else 0)
        for folder in folders
    ]
    found += [prefix_bytes(keys, cut, dtype) for _, keys in config.adapters_elsewhere]
    return sum(sorted(found, reverse=True)[: slot_count(config)])


def _block_bytes(blocks: Mapping[str, int], cut: AdapterCut) -> int:
    """What blocks of these sizes take in float32, of the modules that this process has."""
    first, last = cut.layers
    total = 0
    for path, size in blocks.items():
        place, layer = site_of(cut.whole, path), layer_of(cut.whole, path)
        if place is not None and layer is not None and first <= layer < last:
            heads = bool(cut.whole.sites[place[0]].heads)  # blocks turn latents there, on both sides
            low, high = cut.inputs[place[0] + heads]
            total += 4 * size * (high - low) * (1 + heads)
    return total


def _visit_bytes(cut: AdapterCut) -> int:
    """What scales and shifts of all experts and heads take, at most."""
    layers, sites = range(*cut.layers), cut.whole.sites
    return sum(8 * site.experts * site.outputs for site in sites for layer in layers if site.is_in(layer))


def row_count(config: EngineConfig, backend: Backend) -> int | None:
    """Rows of embedding and head that slots have room for; None: any number, since nothing is reserved."""
    if backend.in_host_memory:
        return config.adapter_rows
    if config.adapter_rows is not None:
        return config.adapter_rows
    elsewhere = [virtual for virtual, _ in config.adapters_elsewhere]
    return max((_FEW_ROWS, *elsewhere, *(replaced_rows(Path(spec.source).expanduser()) for spec in config.adapters)))


def token_count(config: EngineConfig, vocabulary: int) -> int:
    """Tokens that adapters may have behind the model's vocabulary."""
    if config.adapter_tokens is not None:
        return config.adapter_tokens
    folders = [Path(spec.source).expanduser() for spec in config.adapters]
    counts = [stored_tokens(folder) - vocabulary for folder in folders] + [virtual_tokens(one) for one in folders]
    counts += [virtual for virtual, _ in config.adapters_elsewhere]
    return min(MOST_TOKENS, max((0, *counts)))


def adapt_model(
    config: EngineConfig,
    backend: Backend,
    decoder: Decoder,
    *,
    dtype: torch.dtype,
    cut: AdapterCut | None = None,
    head_rows: int | None = None,
    as_stored: bool = True,
    stored: Stored | None = None,
    anywhere: Callable[[bool], bool] = bool,
) -> AdaptedModel | None:
    """`decoder` with slots for adapters, or None when the configuration has none. Device memory is taken here. `cut`:
    which part of the model it is, when other ranks have others; `head_rows`: see `compose_decoder`. `as_stored`:
    whether the embedding has not lost precision when the checkpoint was written. `stored`: the checkpoint of the whole
    model. `anywhere`: see `Backend.adapter_dtype`."""
    slots = slot_count(config)
    if not slots:
        if config.adapters:
            raise ConfigError("adapters are listed, but adapter_slots is 0; raise it or remove them")
        return None
    _check(config, slots)
    library = decoder if isinstance(decoder, TransformersDecoder) else None
    if library is None:
        layout = layout_of(
            decoder.config,
            by_output=backend.adapters_by_output,
            experts=with_experts(config, backend),
            head_rows=head_rows,
        )
    else:
        layout = layout_of_modules(library, by_output=backend.adapters_by_output)
        cut = cut_of_modules(library, by_output=backend.adapters_by_output)
    activations, dtype = dtype, backend.adapter_dtype(decoder, layout, dtype, anywhere)
    pin, most, most_rows = not backend.in_host_memory, adapter_rank(config), row_count(config, backend)
    cut = cut or uncut(layout)
    takes_tokens = library is None or layout.virtual_only
    base, room = None, token_count(config, decoder.config.vocab_size) if takes_tokens else 0
    if library is None:
        with torch.inference_mode():
            base = BaseWeights(decoder, layout, lazy=backend.in_host_memory, as_stored=as_stored)

    norms = None
    if library is None:
        names = family_of(decoder.config.family).names
        offset, hidden = decoder.config.norm_offset, decoder.config.hidden_size
        norms = NormNames(
            names.final_norm,
            norms_in_layer(decoder.config),
            head_norms_in_layer(decoder.config),
            hidden,
            offset,
            decoder.config.final_norm_offset,
            cut.layers,
        )

    def read(name: str, folder: Path) -> LoadedAdapter:
        return read_adapter(
            name,
            folder,
            layout,
            max_rank=most,
            dtype=dtype,
            pin=pin,
            cut=cut,
            base=base,
            row_dtype=activations,
            most_rows=most_rows,
            room=room,
            stored=None if stored is None else BaseTensors(stored, decoder.config),
            norms=norms,
        )

    kernel = backend.lora_kernel(layout, slots, most, dtype)
    if (layout.ends or layout.virtual_only) and any(site.end for site in layout.sites):
        width = next((site.outputs for site in layout.sites if site.end == "embedding"), decoder.config.hidden_size)
        kernel.banks.rows = RowBank(
            slots,
            decoder.config.vocab_size,
            width,
            activations,
            decoder.embedding.device,
            most=None if backend.in_host_memory else most_rows,
            room=room,
            one_by_one=decoder.ops.batch_invariant,
        )
    reserved = with_vectors(config)
    kernel.banks.vectors = backend.vector_bank(layout, slots, reserved=reserved)
    kernel.banks.head_norms = HeadNormBank(slots, decoder.embedding.device)
    kernel.banks.prefixes = PrefixBank(slots, decoder.embedding.device)
    kernel.banks.inputs = InputBank(slots, decoder.embedding.device, one_by_one=decoder.ops.batch_invariant)
    kernel.banks.adaption = AdaptionBank(slots, decoder.embedding.device, one_by_one=decoder.ops.batch_invariant)
    kernel.banks.visits = VisitBank(slots, decoder.embedding.device, one_by_one=decoder.ops.batch_invariant)
    if library is not None:
        beside = beside_slots(config, backend, cut, activations)
        return AdaptedModel(kernel, adapt_modules(library, kernel, layout), layout, dtype, read, beside=beside)
    pairs = zip(layout.sites, cut.whole.sites, strict=True)
    summed = {site.attribute for site, whole in pairs if site.inputs != whole.inputs}
    narrow = adapt(decoder, kernel, layout, sites=1, summed=summed) if isinstance(kernel, FusedLora) else None
    further = None
    if any(site.further for site in layout.sites):
        further = adapt(decoder, kernel, layout, summed=summed, further=True)
    plain = adapt(decoder, kernel, layout, summed=summed)
    # Experts and delta nets take other launches with adapters, and latents do on every device. Embedding and head do
    # not: to most they add nothing.
    others = [site for site in layout.sites if site.further and not site.end]
    other_launches = any(not backend.in_host_memory or site.attribute == LATENT_KEYS for site in others)
    always = decoder.ops.batch_invariant and other_launches
    kernel.banks.norms = backend.norm_bank(norms_of(decoder), slots, reserved=reserved)
    return AdaptedModel(
        kernel, plain, layout, dtype, read, narrow, further, always, captures_altered=reserved,
        beside=beside_slots(config, backend, cut, activations),
    )  # fmt: skip


def manage_adapters(
    config: EngineConfig, model: AdaptedModel, find: Callable[[str], Path], ranks: Ranks | None
) -> AdapterRuntime:
    """The adapters of an engine. `find` gives the local folder of an adapter's source; it runs on a loader thread."""
    slots, host_slots = slot_count(config), config.adapter_host_slots
    rows, vocabulary = model.kernel.banks.rows, model.decoder.config.vocab_size
    room = 0 if rows is None else rows.room
    if ranks is None:
        pool = AdapterPool(
            config.adapters,
            lambda name, source: model.read(name, find(source)),
            slots=slots,
            host_slots=host_slots,
            vocabulary=vocabulary,
            room=room,
        )
        return AdapterRuntime(model, pool)
    from penstock.engine.parallel.adapters import LeadAdapters

    lead = LeadAdapters(ranks, model, find)
    pool = AdapterPool(
        config.adapters,
        lead.read,
        slots=slots,
        host_slots=host_slots,
        dropped=lead.drop,
        unreadable=lead.unreadable,
        vocabulary=vocabulary,
        room=room,
    )
    runtime = AdapterRuntime(model, pool, lead)
    ranks.after_restart.append(runtime.renew)
    return runtime


def _check(config: EngineConfig, slots: int) -> None:
    if config.adapter_host_slots < slots:
        raise ConfigError(f"adapter_host_slots ({config.adapter_host_slots}) must be at least adapter_slots ({slots})")
    pinned = sum(spec.pinned for spec in config.adapters)
    if pinned >= slots:
        raise ConfigError(f"{pinned} adapters are pinned; with adapter_slots {slots} at most {slots - 1} can be")
    names = [spec.name for spec in config.adapters]
    for spec in config.adapters:
        problem = name_problem(spec.name)
        if problem is not None:
            raise ConfigError(f"adapter {spec.name!r}: {problem}")
        if names.count(spec.name) > 1:
            raise ConfigError(f"two adapters are called {spec.name!r}")
        if not spec.source:
            raise ConfigError(f"adapter {spec.name!r} has no source")
