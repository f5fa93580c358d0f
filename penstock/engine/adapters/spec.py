"""Descriptions of adapters for configuration, gateway and engine: plain values, no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

DEFAULT_SLOTS = 20
"""Device slots of an engine that has adapters, when the configuration names no number."""

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of an adapter."""

AdapterState = Literal["known", "loading", "ready", "failed"]
"""`known`: it will be read when it is first asked for. `ready`: in host memory, perhaps in a slot too."""

ADAPTER_UNKNOWN = "no adapter is called"
"""How `Delta.error` begins when a request names an adapter the engine does not know, or has unloaded."""
ADAPTER_FAILED = "the adapter cannot be used"
"""How `Delta.error` begins when an adapter could not be read or does not fit the model."""
NO_ADAPTERS = "this engine serves no adapters: set adapter_slots, or list adapters, in its model's configuration"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """An adapter to serve: what clients call it and where it comes from."""

    name: str = ""
    """The model name that selects it."""
    source: str = ""
    """A folder with adapter_config.json and adapter_model.safetensors, hf:ORG/NAME or s3://BUCKET/PREFIX."""
    pinned: bool = False
    """Read at start and never evicted."""
    owner: str = ""
    """The tenant that alone may use it; empty: all. The engine passes it on."""


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    """An adapter as its engine sees it."""

    name: str
    source: str
    state: AdapterState
    pinned: bool = False
    rank: int = 0
    """0 until it has been read."""
    version: str = ""
    """A digest of its files: changes when a reload brought other weights."""
    on_device: bool = False
    users: int = 0
    """Requests running with it or waiting for a slot."""
    error: str = ""
    """Why it failed."""
    owner: str = ""
    kind: str = ""
    """LoRA, IA3 ...; empty until it has been read."""


@dataclass(slots=True)
class AdapterLoad:
    """The adapters' part of a load snapshot. Counters only grow while the engine lives."""

    slots: int = 0
    on_device: int = 0
    on_host: int = 0
    loading: int = 0
    running: list[str] = field(default_factory=list)
    """Adapters of running sequences."""
    waiting: list[str] = field(default_factory=list)
    """Adapters that waiting sequences need and do not have yet."""
    loads: int = 0
    failures: int = 0
    copies: int = 0
    """Times an adapter was brought into a slot."""
    evictions: int = 0
    """Times an adapter lost its slot to another."""
    host_evictions: int = 0
    load_seconds: float = 0.0


def name_problem(name: str) -> str | None:
    """Why `name` cannot be an adapter's, or None."""
    if _NAME.fullmatch(name):
        return None
    return "an adapter's name is 1 to 128 letters, digits or . _ : / @ + -, and begins with a letter or digit"
