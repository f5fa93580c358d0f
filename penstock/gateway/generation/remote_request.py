"""The bodies of requests to other servers: every option that means the same there is passed on.

A body has the fields of OpenAI's API; the dialect of a server translates them. What a dialect cannot express is refused
where it would change the answer, and named as ignored where it is only advice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.backends.remote.features import Operation
from penstock.gateway.app.decoding import plain
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.prompt_options import continues
from penstock.gateway.generation.remote import RemoteSpec
from penstock.gateway.generation.remote_source import RemoteCall
from penstock.gateway.generation.request_decoder import ignore_advice
from penstock.gateway.generation.schemas import CHAT_UNSUPPORTED, ChatRequest, CompletionRequest
from penstock.identity.labels import Demand
from penstock.protocol.errors import InvalidRequest
from penstock.routing.remotes import RemoteModel

OWN_OPTIONS = (
    *("model", "messages", "prompt", "stream", "stream_options", "stop", "max_tokens", "max_completion_tokens", "n"),
    *("user", "safety_identifier", "metadata", "service_tier", "priority", "speculation", "prompt_cache_key", "store"),
    "watermark",
    *("conversation", "rag", "modalities", "server_tools", "add_generation_prompt", "continue_final_message"),
    *("functions", "function_call"),
    "include_reasoning",
    *("echo", "best_of", "cache_salt", "include_stop_str_in_output", "no_stop_trim", "prompt_logprobs"),
)
"""Options that this gateway applies itself, or writes in another form."""
CHAT_OPTIONS = tuple(name for name in ChatRequest.__struct_fields__ if name not in (*OWN_OPTIONS, *CHAT_UNSUPPORTED))
COMPLETION_OPTIONS = tuple(name for name in CompletionRequest.__struct_fields__ if name not in OWN_OPTIONS)
"""All other options mean the same there."""


def passed_on(request: ChatRequest | CompletionRequest, names: Sequence[str]) -> dict[str, Any]:
    """Those options of a request that are given."""
    fields = plain(request)
    body = {name: fields[name] for name in names if fields.get(name) is not None}
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


def chat_body(exchange: Exchange, request: ChatRequest, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`messages` have been checked."""
    body = passed_on(request, CHAT_OPTIONS) | {"messages": list(messages)}
    for tool in body.get("tools", ()):  # the grammar of a free-text tool is only part of its description there
        tool["function"].pop("syntax", None)
        if tool["function"].pop("grammar", None):
            ignore_advice(exchange, "tools.format")
        tool["function"] = _not_null(tool["function"])
    for name in ("response_format", "thinking", "structured_outputs"):
        if name in body:
            body[name] = _not_null(body[name])
    if (wrapped := body.get("response_format", {}).get("json_schema")) is not None:
        body["response_format"]["json_schema"] = _not_null(wrapped)
    if request.reasoning is not None:
        if request.reasoning.effort is not None:
            body.setdefault("reasoning_effort", request.reasoning.effort)
        if request.reasoning.max_tokens is None and request.reasoning.enabled is None:
            del body["reasoning"]
        else:
            body["reasoning"] = _not_null(body["reasoning"])
    if continues(request):
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    elif request.add_generation_prompt is False:
        body["add_generation_prompt"] = False
    return body


def _not_null(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are not null: other servers refuse a null where a client would leave the field out. What is inside of
    them, such as a schema, stays as it is."""
    return {name: value for name, value in fields.items() if value is not None}


def fitted(exchange: Exchange, model: RemoteModel, body: Mapping[str, Any], operation: Operation) -> dict[str, Any]:
    """The body as far as the dialect of the servers can express it."""
    if model.kind != "chat":
        what, path = ("vectors", "embeddings") if model.kind == "embedding" else ("scores", "rerank")
        raise InvalidRequest(
            f"`{model.name}` is not a chat model: it makes {what} of texts (/v1/{path}).", param="model"
        )
    if not model.supports(operation):
        wanted = "the chat API" if operation == "chat" else "text completions"
        raise InvalidRequest(
            f"`{model.name}` runs on another server, whose API ({model.dialect}) has nothing like {wanted}.",
            param="model",
            code="remote_model",
        )
    fit = model.fit(body, operation)
    if fit.refused:
        name = fit.refused[0]
        raise InvalidRequest(
            f"`{name}` cannot be honoured: `{model.name}` runs on another server, whose API ({model.dialect}) does not "
            "have it.",
            param=name,
            code="unsupported_parameter",
        )
    for name in fit.ignored:
        if name not in ("stream", "stream_options"):
            ignore_advice(exchange, name)
    return fit.body


def calls_of(model: RemoteModel, kind: Operation, bodies: Sequence[dict[str, Any]], n: int) -> tuple[RemoteCall, ...]:
    """One request per prompt, or one per choice where the servers give a single choice at a time."""
    calls: list[RemoteCall] = []
    for body in bodies:
        first = sum(call.choices for call in calls)
        if n == 1:
            calls.append(RemoteCall(kind, body, first))
        elif model.supports("n"):
            calls.append(RemoteCall(kind, {**body, "n": n}, first, n))
        else:
            # Equal seeds would give equal answers.
            seed = body.get("seed")
            seeded = ({} if seed is None else {"seed": seed + number} for number in range(n))
            calls += [RemoteCall(kind, {**body, **each}, first + number) for number, each in enumerate(seeded)]
    return tuple(calls)


def internal_call(
    id: str,
    model: RemoteModel,
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    tokens: int,
    *,
    request_id: str,
    started_at: float,
    prompt_tokens: int,
    time_limit_s: float | None,
    demand: Demand,
    n: int = 1,
) -> RemoteSpec:
    """The spec of a question that the gateway itself asks a model. `demand`: the labels that the request for which it
    asks needs. `tokens`: the most of an answer."""
    body = {
        **options,
        "messages": list(messages),
        "stream": True,
        "stream_options": {"include_usage": True},
        model.limit_field: tokens,
    }
    return RemoteSpec(
        id=id,
        model=model,
        calls=calls_of(model, "chat", [dict(model.fit(body, "chat").body)], n),
        request_id=request_id,
        started_at=started_at,
        prompt_tokens=prompt_tokens,
        most_tokens=tokens * n,
        time_limit_s=time_limit_s,
        demand=demand,
    )
