"""From a conversation to the request for another server, as far as the two mean the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.remote import Relay
from penstock.gateway.generation.sampling import Limits, stop_strings
from penstock.gateway.generation.schemas import ChatRequest
from penstock.gateway.process.service import Service
from penstock.protocol.errors import InvalidRequest
from penstock.routing.remotes import RemoteModel

PASSED_ON = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "seed",
    "n",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
)
"""What means the same there; a server that does not know one of these refuses it itself."""
TOKENS_OF_ITS_OWN = ("logit_bias", "stop_token_ids", "logprobs", "top_logprobs")
"""What speaks of tokens, which are that server's own."""
CHARACTERS_PER_TOKEN = 4
UNLIMITED = 4096
"""Tokens that an answer without a limit is expected to have at most, for what is reserved."""


def relay(
    service: Service,
    attempt: Attempt,
    request: ChatRequest,
    messages: Sequence[dict[str, Any]],
    limit: Limits,
    model: RemoteModel,
) -> Relay:
    """The generation in which `model` answers; `messages` have been checked."""
    for name in TOKENS_OF_ITS_OWN:
        if getattr(request, name):
            raise InvalidRequest(
                f"`{name}` speaks of tokens, and those of `{model.name}`, which another server runs, are not known.",
                param=name,
                code="unsupported_parameter",
            )
    fields = msgspec.to_builtins(request)
    body: dict[str, Any] = {name: fields[name] for name in PASSED_ON if fields.get(name) is not None}
    body |= {"messages": list(messages), "stream": True, "stream_options": {"include_usage": True}}
    stops = stop_strings(request)
    if stops:
        body["stop"] = stops
    most = limit.default if limit.max_tokens is None else limit.max_tokens
    if most is not None:
        body[model.limit_field] = most
    attempt.note_model(request.model, model, "direct" if request.model == model.name else "alias")
    n = request.n or 1
    characters = sum(len(message["content"]) for message in messages)
    return Relay(
        model,
        body,
        choices=n,
        request_id=attempt.exchange.request_id,
        metrics=service.metrics,
        started_at=attempt.exchange.started_at,
        prompt_tokens=max(characters // CHARACTERS_PER_TOKEN, 1),
        most_tokens=n * (most or model.context_window or UNLIMITED),
        time_limit_s=service.settings.time_limit_s,
    )
