"""From a chat request to the body of a request to another server, as far as its options mean the same there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.estimates import CHARACTERS_PER_TOKEN
from penstock.gateway.generation.prompt_options import continues
from penstock.gateway.generation.remote import RemoteSpec
from penstock.gateway.generation.request_decoder import ignore_advice
from penstock.gateway.generation.sampling import TokenLimit, stop_strings
from penstock.gateway.generation.schemas import CHAT_UNSUPPORTED, ChatRequest
from penstock.gateway.generation.settings import GenerationSettings
from penstock.protocol.errors import InvalidRequest
from penstock.routing.remotes import RemoteModel

TOKEN_OPTIONS = (
    *("logit_bias", "stop_token_ids", "allowed_token_ids", "logprobs", "top_logprobs", "prompt_logprobs"),
    *("return_token_ids", "return_tokens_as_token_ids"),
)
"""Options about tokens, which only the other server knows."""
OWN_OPTIONS = (
    *("model", "messages", "stream", "stream_options", "stop", "max_tokens", "max_completion_tokens"),
    *("user", "safety_identifier", "metadata", "service_tier", "priority", "speculation", "prompt_cache_key", "store"),
    *("conversation", "rag", "modalities", "server_tools", "echo", "add_generation_prompt", "continue_final_message"),
)
"""Options that this gateway applies itself, or writes in another form."""
PASSED_ON = tuple(
    name for name in ChatRequest.__struct_fields__ if name not in (*TOKEN_OPTIONS, *OWN_OPTIONS, *CHAT_UNSUPPORTED)
)
"""All other options mean the same there; a server that does not know one of them refuses it itself."""
UNLIMITED = 4096
"""Completion tokens that are reserved for an answer without a limit."""


def remote_spec(
    attempt: Attempt,
    settings: GenerationSettings,
    request: ChatRequest,
    messages: Sequence[dict[str, Any]],
    limit: TokenLimit,
    model: RemoteModel,
) -> RemoteSpec:
    """What `model` is asked to generate; `messages` have been checked."""
    for name in TOKEN_OPTIONS:
        if getattr(request, name) or (name == "prompt_logprobs" and request.prompt_logprobs is not None):
            raise InvalidRequest(
                f"`{name}` is about tokens; those of `{model.name}`, which another server runs, are not known here.",
                param=name,
                code="unsupported_parameter",
            )
    if request.priority:
        ignore_advice(attempt.exchange, "priority")
    fields = msgspec.to_builtins(request)
    body: dict[str, Any] = {name: fields[name] for name in PASSED_ON if fields.get(name) is not None}
    body |= {"messages": list(messages), "stream": True, "stream_options": {"include_usage": True}}
    for tool in body.get("tools", ()):  # the grammar of a free-text tool is only part of its description there
        tool["function"].pop("syntax", None)
        if tool["function"].pop("grammar", None):
            ignore_advice(attempt.exchange, "tools.format")
    if continues(request):
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    elif request.add_generation_prompt is False:
        body["add_generation_prompt"] = False
    stops = stop_strings(request)
    if stops:
        body["stop"] = stops
    most = limit.default if limit.max_tokens is None else limit.max_tokens
    if most is not None:
        body[model.limit_field] = most
    attempt.note_model(request.model, model, "direct" if request.model == model.name else "alias")
    n = request.n or 1
    characters = sum(len(message["content"]) for message in messages)
    return RemoteSpec(
        id=attempt.ids.next(),
        model=model,
        body=body,
        choices=n,
        request_id=attempt.exchange.request_id,
        started_at=attempt.exchange.started_at,
        prompt_tokens=max(characters // CHARACTERS_PER_TOKEN, 1),
        most_tokens=n * (most or model.context_window or UNLIMITED),
        time_limit_s=settings.time_limit(attempt.exchange),
        demand=attempt.exchange.demand,
    )
