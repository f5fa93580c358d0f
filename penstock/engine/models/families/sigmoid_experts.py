"""Keys of GGUF files whose experts are scored by sigmoids."""

from __future__ import annotations

from penstock.engine.models.families.family import GGUFKeys
from penstock.errors import CheckpointError

_LEFT_OUT, _SIGMOID = 0, 2


def require_sigmoid(keys: GGUFKeys) -> None:
    """Refuse a file of an architecture that scores by sigmoids and says otherwise."""
    found = keys.whole("expert_gating_func", _LEFT_OUT)
    if found not in (_LEFT_OUT, _SIGMOID):
        raise CheckpointError(f"{keys.architecture}.expert_gating_func is {found}; supported: {_SIGMOID} (sigmoid)")
