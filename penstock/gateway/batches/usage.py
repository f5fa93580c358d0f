"""The tokens that the requests of a batch used, as their answers report them."""

from __future__ import annotations

from typing import Any

import msgspec


class Usage(msgspec.Struct, frozen=True):
    """Of one answer, or the sum over a batch."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def shown(self) -> dict[str, Any]:
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


NONE = Usage()
FIELDS = Usage.__struct_fields__


class _Details(msgspec.Struct):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


_NO_DETAILS = _Details()


class _Reported(msgspec.Struct):
    """`usage` in the words of chat and text completions and embeddings, of responses, and of messages."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    """Of messages, where `input_tokens` does not contain them."""


class _Body(msgspec.Struct):
    usage: _Reported | None = None


_body = msgspec.json.Decoder(_Body)


def usage_of(body: bytes) -> Usage:
    """What an answer says it used; nothing where it says nothing."""
    try:
        used = _body.decode(body).usage
    except (msgspec.DecodeError, UnicodeDecodeError):
        return NONE
    if used is None:
        return NONE
    read = used.cache_read_input_tokens or 0
    given = used.prompt_tokens_details or used.input_tokens_details or _NO_DETAILS
    made = used.completion_tokens_details or used.output_tokens_details or _NO_DETAILS
    return Usage(
        used.prompt_tokens + used.input_tokens + read,
        given.cached_tokens + read,
        used.completion_tokens + used.output_tokens,
        made.reasoning_tokens,
    )
