"""Rotary embedding (RoPE) as a checkpoint's configuration describes it. `layers.rotary` computes the tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from penstock.errors import CheckpointError

KINDS = ("default", "linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Base frequency, and how frequencies are scaled for longer contexts."""

    rotated: float = 1.0
    """Share of a head's dimensions that is rotated, the first ones."""
    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """yarn: whether the ends of the blended range are rounded to whole dimensions."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    """yarn: the factor of cosines and sines follows from these two, when both are given."""
    attention_factor: float | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    """longrope: a divisor of each frequency, for contexts within the original length and beyond it."""


def read_rope(
    raw: Mapping[str, Any],
    scaling: Mapping[str, Any] | None = None,
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> RopeConfig:
    """From the keys of a `config.json`.

    `scaling`: the rope keys, where they are not in the usual place. `aliases`: other names of scaling kinds.
    """
    if scaling is None:
        # Newer files keep everything under rope_parameters; older ones have rope_theta beside rope_scaling.
        scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    kind = aliases.get(kind, kind)
    if kind not in KINDS:
        raise CheckpointError(f"rope scaling {kind!r} is not supported; supported: {', '.join(KINDS)}")
    positions = int(raw.get("max_position_embeddings", 2048))
    original = scaling.get("original_max_position_embeddings") or raw.get("original_max_position_embeddings")
    original = int(original or positions)
    # longrope gives its two lengths instead of a factor.
    factor = scaling.get("factor") or (positions / original if kind == "longrope" else 1.0)

    def number(key: str) -> float | None:
        value = scaling.get(key)
        return None if value is None else float(value)

    return RopeConfig(
        rotated=float(scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))),
        theta=float(scaling.get("rope_theta", raw.get("rope_theta", 10000.0))),
        kind=kind,
        factor=float(factor),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        original_max_positions=original,
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        truncate=bool(scaling.get("truncate", True)),
        mscale=number("mscale"),
        mscale_all_dim=number("mscale_all_dim"),
        attention_factor=number("attention_factor"),
        short_factor=tuple(float(value) for value in scaling.get("short_factor") or ()),
        long_factor=tuple(float(value) for value in scaling.get("long_factor") or ()),
    )
