"""The rank that an adapter has in a slot, by its configuration and the shapes in its file. Needs no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

_FACTOR = re.compile(r"(.+)\.(lokr_w[12](?:_[ab])?|hada_w[12]_[ab])(?:\.default)?")
_RANKS = {"LORA": ("r", 8), "ADALORA": ("init_r", 12), "VERA": ("r", 256), "MISS": ("r", 64), "DELORA": ("r", 8),
          "VBLORA": ("r", 4), "LOHA": ("r", 8)}  # fmt: skip
"""What a kind calls its rank, and the default."""


def stored_rank(config: Mapping[str, Any], shapes: Mapping[str, list[int]]) -> int:
    """0 where it has no matrices, or they cannot be known. `shapes`: those in its file, empty where it is not here."""
    kind = config.get("peft_type", "LORA")
    if kind == "LOKR":
        return max(map(_kronecker, _modules(shapes).values()), default=0)
    key, default = _RANKS.get(kind, ("", 0))
    if not key:
        return 0
    patterns = config.get("rank_pattern") if kind != "ADALORA" else None
    ranks = [rank for rank in (config.get(key, default), *(patterns or {}).values()) if isinstance(rank, int)]
    most = max(ranks, default=0)
    if kind == "LOHA":
        sizes = [min(of["hada_w1_a"][0], of["hada_w1_b"][-1]) for of in _modules(shapes).values() if len(of) == 4]
        most = min(most * most, max(sizes, default=most * most))
    return most


def _modules(shapes: Mapping[str, list[int]]) -> dict[str, dict[str, list[int]]]:
    found: dict[str, dict[str, list[int]]] = {}
    for name, shape in shapes.items():
        match = _FACTOR.fullmatch(name)
        if match is not None and shape:
            found.setdefault(match[1], {})[match[2]] = shape
    return found


def _kronecker(of: Mapping[str, list[int]]) -> int:
    ranks = []
    for name in ("lokr_w1", "lokr_w2"):
        sizes = of.get(name) or [*of.get(f"{name}_a", [0]), *of.get(f"{name}_b", [0])]
        ranks.append(min(sizes))
    return math.prod(ranks)
