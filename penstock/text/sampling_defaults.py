"""The sampling values that a checkpoint's makers recommend, from its own files."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from penstock.config.sampling import SamplingDefaults, usable

log = logging.getLogger(__name__)

_GGUF = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
"""Our names, and those under `general.sampling.` in GGUF metadata."""


def from_generation_config(values: Mapping[str, Any], where: str) -> SamplingDefaults:
    """Of a generation_config.json. `do_sample: false` asks for the likeliest token, as in transformers; where it is
    missing, only what is written counts."""
    found = {**values, "max_tokens": values.get("max_new_tokens")}
    if values.get("do_sample") is False:
        found["temperature"] = 0.0
    return _usable(found, where)


def from_gguf_metadata(metadata: Mapping[str, Any], where: str) -> SamplingDefaults:
    """Of a GGUF file, whose makers may have stored them there."""
    return _usable({ours: metadata.get(f"general.sampling.{theirs}") for ours, theirs in _GGUF.items()}, where)


def _usable(values: Mapping[str, Any], where: str) -> SamplingDefaults:
    defaults, bad = usable(values)
    if bad:
        log.warning("sampling values of %s cannot be used: %s", where, ", ".join(bad))
    return defaults
