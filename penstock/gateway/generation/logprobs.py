"""Log-probabilities of tokens, as chat completions and responses show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.gateway.generation.choice import TokenPiece
from penstock.text import TextModel


def logprob_entries(text: TextModel, tokens: Sequence[TokenPiece], top: int) -> list[dict[str, Any]]:
    """The entry of each token, with the `top` most likely alternatives."""
    entries = []
    for token in tokens:
        pairs = zip(token.logprob.top_ids[:top], token.logprob.top_logprobs[:top], strict=True)
        entries.append(
            {
                **_entry(text, token.id, token.logprob.logprob),
                "top_logprobs": [_entry(text, id, logprob) for id, logprob in pairs],
            }
        )
    return entries


def _entry(text: TextModel, id: int, logprob: float) -> dict[str, Any]:
    return {"token": text.token_text(id), "logprob": finite(logprob), "bytes": list(text.token_bytes(id))}


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI's API writes this floor instead."""
    return max(logprob, -9999.0)
