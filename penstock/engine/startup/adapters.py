"""The adapters of an engine, as its configuration asks for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from penstock.engine.adapters.apply import FusedLora, adapt
from penstock.engine.adapters.layout import layout_of
from penstock.engine.adapters.peft import LoadedAdapter, read_adapter
from penstock.engine.adapters.pool import AdapterPool
from penstock.engine.adapters.runtime import AdapterRuntime
from penstock.engine.adapters.spec import DEFAULT_SLOTS, name_problem
from penstock.engine.backends.backend import Backend
from penstock.engine.config import EngineConfig
from penstock.engine.models.decoder import Decoder
from penstock.errors import ConfigError


def slot_count(config: EngineConfig) -> int:
    """Device slots the configuration asks for; 0 turns adapters off."""
    if config.adapter_slots is not None:
        return config.adapter_slots
    return DEFAULT_SLOTS if config.adapters else 0


def make_adapters(
    config: EngineConfig, backend: Backend, decoder: Decoder, find: Callable[[str], Path], *, dtype: torch.dtype
) -> AdapterRuntime | None:
    """The adapters of an engine, or None when it has none. Device memory for the slots is taken here.
    `find` gives the local folder of an adapter's source."""
    slots = slot_count(config)
    if not slots:
        if config.adapters:
            raise ConfigError("adapters are listed, but adapter_slots is 0; raise it or remove them")
        return None
    _check(config, slots)
    layout = layout_of(decoder.config, by_output=backend.adapters_by_output)
    dtype, pin = backend.adapter_dtype(decoder, layout, dtype), not backend.in_host_memory

    def read(name: str, source: str) -> LoadedAdapter:
        return read_adapter(name, find(source), layout, max_rank=config.adapter_rank, dtype=dtype, pin=pin)

    pool = AdapterPool(config.adapters, read, slots=slots, host_slots=config.adapter_host_slots)
    kernel = backend.lora_kernel(layout, slots, config.adapter_rank, dtype)
    narrow = adapt(decoder, kernel, layout, sites=1) if isinstance(kernel, FusedLora) else None
    return AdapterRuntime(pool, kernel, adapt(decoder, kernel, layout), layout, dtype, narrow)


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
