"""Rotary embeddings of their own for layers that see everything and for those with a window."""

from __future__ import annotations

from penstock.engine.models.families.family import HFConfig, mapping
from penstock.engine.models.rope import RopeConfig, read_rope


def two_ropes(raw: HFConfig, local_theta: float) -> tuple[RopeConfig, RopeConfig]:
    """Of layers that see everything, and of those with a window. Files written before there was one entry for each kind
    of layer have `rope_theta` and `rope_scaling` for the former; `local_theta` is the latter's base."""
    ropes, scaling = mapping(raw, "rope_parameters"), mapping(raw, "rope_scaling")
    whole = {key: raw[key] for key in ("max_position_embeddings", "partial_rotary_factor") if key in raw}
    rounded = {"truncate": ropes.get("truncate", True)}  # the reference looks for it one level up
    full, local = (mapping(ropes, kind) or {"rope_type": "default"} for kind in ("full_attention", "sliding_attention"))
    full = {"rope_theta": raw["rope_theta"], **full, **scaling, **rounded}
    local = {"rope_theta": local_theta, **local, **rounded}
    return read_rope(whole, full), read_rope(whole, local)
