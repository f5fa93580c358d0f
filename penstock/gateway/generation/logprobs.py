"""Log-probabilities of tokens, as chat completions and responses show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.engine.request import TokenLogprob
from penstock.gateway.generation.choice import AnyToken, SpelledToken
from penstock.text import TextModel


def logprob_entries(
    text: TextModel | None, tokens: Sequence[AnyToken], top: int, *, as_ids: bool = False
) -> list[dict[str, Any]]:
    """The entry of each token, with the `top` most likely alternatives. `as_ids`: tokens are named by their ids.
    `text`: the tokenizer, where tokens are ids."""
    entries = []
    for token in tokens:
        if isinstance(token, SpelledToken):
            entries.append({**_spelled(token), "top_logprobs": [_spelled(other) for other in token.top[:top]]})
            continue
        assert text is not None, "ids are of a tokenizer that is known"
        pairs = zip(token.logprob.top_ids[:top], token.logprob.top_logprobs[:top], strict=True)
        entries.append(
            {
                **_entry(text, token.id, token.logprob.logprob, as_ids),
                "top_logprobs": [_entry(text, id, logprob, as_ids) for id, logprob in pairs],
            }
        )
    return entries


def _entry(text: TextModel, id: int, logprob: float, as_ids: bool) -> dict[str, Any]:
    name = id_name(id) if as_ids else text.token_text(id)
    return {"token": name, "logprob": finite(logprob), "bytes": list(text.token_bytes(id))}


def _spelled(token: SpelledToken) -> dict[str, Any]:
    data = list(token.token.encode()) if token.bytes is None else token.bytes
    return {"token": token.token, "logprob": finite(token.logprob), "bytes": data}


def id_name(id: int) -> str:
    """A token by its id, where different tokens may have the same text."""
    return f"token_id:{id}"


def prompt_entries(
    text: TextModel, tokens: Sequence[int], scores: Sequence[TokenLogprob | None] | None, top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """`prompt_logprobs`: for each prompt token, itself and the `top` most likely ones by their ids; None for the first,
    which nothing predicts."""
    entries: list[dict[str, dict[str, Any]] | None] = []
    for token, score in zip(tokens, scores or [None] * len(tokens), strict=True):
        if score is None:
            entries.append(None)
            continue
        ranked = zip(score.top_ids[:top], score.top_logprobs[:top], range(1, top + 1), strict=False)
        found = {str(id): _scored(text, id, logprob, rank) for id, logprob, rank in ranked}
        found.setdefault(str(token), _scored(text, token, score.logprob, score.rank))
        entries.append(found)
    return entries


def _scored(text: TextModel, id: int, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": finite(logprob), "rank": rank, "decoded_token": text.token_text(id)}


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI's API writes this floor instead."""
    return max(logprob, -9999.0)
