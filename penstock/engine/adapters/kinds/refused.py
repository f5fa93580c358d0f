"""Kinds of adapters that are refused, and what to do with one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_MERGE = "merge it into the model (peft: merge_and_unload) and serve that as a model of its own"
_FULL = (
    "it changes whole matrices, not only by ones of low rank",
    f"{_MERGE}, or write a LoRA that is close to it (peft: save_as_lora)",
)
_TURNS = ("it multiplies matrices of the model, which no matrix of low rank stands for", _MERGE)
_ROUTED = ("it weighs several adapters for every token", "serve its LoRAs one by one")
_NEW = ("its change of the model is not known here", _MERGE)
_REFUSED: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("XLORA", "POLY"), _ROUTED),
    **dict.fromkeys(("HRA", "PSOFT", "ROAD", "HIRA", "BONE"), _TURNS),
    **dict.fromkeys(("FOURIERFT", "WAVEFT", "C3A", "RANDLORA", "SHIRA", "GRALORA", "TINYLORA", "UNILORA"), _FULL),
}


def refusal(kind: Any, supported: Iterable[str]) -> str:
    """The sentence for a `peft_type` that cannot be applied. `supported`: those that can."""
    known = sorted(supported)
    if not isinstance(kind, str) or not kind.isidentifier():
        return f"peft_type {kind!r:.80} is not supported; supported: {', '.join(known)}"
    why, instead = _REFUSED.get(kind, _NEW)
    return f"peft_type {kind:.80} is not supported: {why}; {instead}. Supported: {', '.join(known)}"
