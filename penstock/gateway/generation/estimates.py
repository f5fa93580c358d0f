"""Estimates of lengths where no tokenizer is at hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CHARACTERS_PER_TOKEN = 4
"""The usual average of English text. Where too few tokens would hurt, callers add a margin of their own."""
MARGIN = 4 / 3
"""Estimates of tokens are raised by this factor: most tokenizers then make fewer, in most languages."""
MESSAGE_TOKENS = 8
"""Estimated tokens around a message."""


def estimated_tokens(message: Mapping[str, Any]) -> int:
    """More than most tokenizers make of a message, in most languages."""
    calls = sum(len(call["function"]["arguments"]) for call in message.get("tool_calls") or ())
    return int((len(str(message["content"])) + calls) * MARGIN / CHARACTERS_PER_TOKEN) + MESSAGE_TOKENS


def estimated_text(text: str) -> int:
    """The same for a text."""
    return int(len(text) * MARGIN / CHARACTERS_PER_TOKEN) + 1
