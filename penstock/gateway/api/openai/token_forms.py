"""Tokens of a text as llama.cpp and text-generation-inference show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.text import TextModel


def pieces(text: TextModel, tokens: Sequence[int]) -> list[dict[str, Any]]:
    """llama.cpp's form: each token with its text, or its bytes where they are not whole characters."""
    found = []
    for token in tokens:
        data = text.token_bytes(token)
        try:
            piece: str | list[int] = data.decode()
        except UnicodeDecodeError:
            piece = list(data)
        found.append({"id": token, "piece": piece})
    return found


def spans(text: TextModel, tokens: Sequence[int], whole: str) -> list[dict[str, Any]]:
    """The form of text-generation-inference: each token with the part of the text that it completes."""
    detokenizer = text.detokenizer(skip_special=False)
    found: list[dict[str, Any]] = []
    at = -text.added_length(tokens, whole)
    for token in tokens:
        begin, at = at, at + len(detokenizer.push([token]))
        start, stop = max(begin, 0), min(max(at, 0), len(whole))
        found.append({"id": token, "text": whole[start:stop], "start": start, "stop": stop})
    return found
