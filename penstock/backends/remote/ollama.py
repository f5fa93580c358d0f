"""Ollama's own API: a line of JSON per piece of an answer, calls of tools as whole objects.

It loads models when they are asked for; `/api/ps` tells whether this one is loaded, so that of several servers one that
need not load it is preferred. It does not tell how busy it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from penstock.backends.remote.chunk import (
    CallDelta,
    Chunk,
    ChunkChoice,
    ChunkDelta,
    ChunkLogprobs,
    ChunkUsage,
    EmbeddingBatch,
    FunctionDelta,
    TokenOdds,
    end_chunk,
)
from penstock.backends.remote.conversation import (
    arguments_of,
    limit_of,
    offered,
    prompt_of,
    stops_of,
    text_of,
    tool_names,
)
from penstock.backends.remote.dialect import Call, Dialect, Reader, encode, json_object, vectors
from penstock.backends.remote.failure import failed_stream, garbage
from penstock.backends.remote.features import Feature, Fit, Operation
from penstock.backends.remote.frames import Event, NdjsonFrames
from penstock.backends.remote.load import ServerLoad

OPTIONS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition_penalty": "repeat_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
}
"""What OpenAI's and vLLM's fields are called in Ollama's `options`."""


class OllamaReader(Reader):
    """Lines of an answer of `/api/chat` or `/api/generate`."""

    def __init__(self) -> None:
        super().__init__(NdjsonFrames())
        self._calls = 0

    def read(self, event: Event) -> Iterator[Chunk]:
        sent = json_object(event.data)
        if sent.get("error"):
            raise failed_stream("", str(sent["error"]))
        try:
            yield from self._read(sent)
        except (KeyError, TypeError, AttributeError, ValueError, msgspec.ValidationError) as error:
            raise garbage() from error

    def _read(self, sent: dict[str, Any]) -> Iterator[Chunk]:
        message = sent.get("message") or {"content": sent.get("response"), "thinking": sent.get("thinking")}
        delta = ChunkDelta(message.get("content") or None, message.get("thinking") or None)
        for call in message.get("tool_calls") or ():
            delta.tool_calls = delta.tool_calls or []
            number, self._calls = self._calls, self._calls + 1
            function = call["function"]
            made = FunctionDelta(function["name"], encode(function.get("arguments") or {}).decode())
            delta.tool_calls.append(CallDelta(number, call.get("id") or f"call_{number}", made))
        odds = sent.get("logprobs")
        logprobs = ChunkLogprobs(msgspec.convert(odds, list[TokenOdds])) if odds else None
        if delta.content or delta.reasoning_content or delta.tool_calls or logprobs:
            yield Chunk([ChunkChoice(0, delta, logprobs)])
        if sent.get("done"):
            self.done = True
            reason = "length" if sent.get("done_reason") == "length" else "tool_calls" if self._calls else "stop"
            usage = ChunkUsage(sent.get("prompt_eval_count") or 0, sent.get("eval_count") or 0)
            yield end_chunk(reason, usage)


class Ollama(Dialect):
    name = "ollama"
    features: ClassVar[frozenset[Feature]] = frozenset(
        (
            *("chat", "completions", "embeddings", "tools", "seed", "response_format", "reasoning", "logprobs"),
            *("top_logprobs", "continue_final_message"),
        )
    )
    parameters: ClassVar[frozenset[str] | None] = frozenset(
        (
            *OPTIONS,
            *("tools", "tool_choice", "response_format", "logprobs", "top_logprobs", "continue_final_message"),
            *("reasoning_effort", "enable_thinking", "suffix"),
        )
    )

    def fit(self, body: Mapping[str, Any], operation: Operation = "chat") -> Fit:
        found = super().fit(body, operation)
        refused, ignored = list(found.refused), list(found.ignored)
        _, choice = offered(found.body)
        if choice not in ("auto", "none"):
            refused.append("tool_choice")
        kind = (found.body.get("response_format") or {}).get("type", "text")
        if kind not in ("text", "json_object", "json_schema"):
            refused.append("response_format")
        if any(tool["function"].get("strict") for tool in found.body.get("tools") or ()):
            ignored.append("tools.strict")
        return Fit(found.body, tuple(refused), tuple(ignored))

    def call(self, operation: Operation, body: Mapping[str, Any]) -> Call:
        sent: dict[str, Any] = {"model": self.upstream.model, "stream": True, "options": _options(body)}
        wanted = _format(body.get("response_format") or {})
        if wanted is not None:
            sent["format"] = wanted
        logprobs = body.get("logprobs")
        if logprobs is not None and logprobs is not False:
            sent["logprobs"] = True
            most = body.get("top_logprobs") if operation == "chat" else logprobs
            if most:
                sent["top_logprobs"] = most
        if operation == "completions":
            sent |= {"prompt": prompt_of(body)}
            sent |= {"suffix": body["suffix"]} if body.get("suffix") else {"raw": True}
            return Call(f"{self.upstream.root}/api/generate", encode(sent))
        names = tool_names(body["messages"])
        sent["messages"] = [_message(message, names) for message in body["messages"]]
        tools, choice = offered(body)
        if tools and choice != "none":
            sent["tools"] = [
                {"type": "function", "function": {name: value for name, value in tool.items() if name != "strict"}}
                for tool in tools
            ]
        if body.get("reasoning_effort") is not None:
            sent["think"] = _THINK.get(body["reasoning_effort"], body["reasoning_effort"])
        elif body.get("enable_thinking") is not None:
            sent["think"] = body["enable_thinking"]
        return Call(f"{self.upstream.root}/api/chat", encode(sent))

    def reader(self, operation: Operation, body: Mapping[str, Any]) -> Reader:
        return OllamaReader()

    def embed_call(self, texts: Sequence[str], dimensions: int | None = None) -> Call:
        sent: dict[str, Any] = {"model": self.upstream.model, "input": list(texts)}
        if dimensions is not None:
            sent["dimensions"] = dimensions
        return Call(f"{self.upstream.root}/api/embed", encode(sent))

    def embeddings(self, data: bytes) -> EmbeddingBatch:
        found = json_object(data)
        return EmbeddingBatch(vectors(found.get("embeddings")), int(found.get("prompt_eval_count") or 0))

    def health_call(self) -> Call:
        return Call(f"{self.upstream.root}/api/version")

    def load_call(self) -> Call | None:
        return Call(f"{self.upstream.root}/api/ps")

    def load(self, data: bytes) -> ServerLoad | None:
        models = json_object(data).get("models")
        if not isinstance(models, list):
            return None
        name = self.upstream.model
        names = {name, name if ":" in name else f"{name}:latest"}
        return ServerLoad(
            loaded=any(
                isinstance(each, dict) and (each.get("model") in names or each.get("name") in names) for each in models
            )
        )


def _options(body: Mapping[str, Any]) -> dict[str, Any]:
    options = {there: body[here] for here, there in OPTIONS.items() if body.get(here) is not None}
    limit = limit_of(body)
    if limit is not None:
        options["num_predict"] = limit
    stops = stops_of(body)
    if stops:
        options["stop"] = stops
    if options.get("top_k") == -1:
        options["top_k"] = 0
    return options


def _format(wanted: Mapping[str, Any]) -> Any:
    if wanted.get("type") == "json_object":
        return "json"
    return (wanted["json_schema"].get("schema") or {}) if wanted.get("type") == "json_schema" else None


_THINK = {"none": False, "minimal": "low", "xhigh": "high", "max": "high"}


def _message(message: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    role = {"developer": "system", "function": "tool"}.get(message["role"], message["role"])
    found: dict[str, Any] = {"role": role, "content": text_of(message.get("content"))}
    if message.get("tool_calls"):
        found["tool_calls"] = [
            {"id": call["id"], "function": {"name": call["function"]["name"], "arguments": arguments_of(call)}}
            for call in message["tool_calls"]
        ]
    if message.get("reasoning_content"):
        found["thinking"] = message["reasoning_content"]
    if role == "tool":
        found["tool_call_id"] = message.get("tool_call_id", "")
        found["tool_name"] = names.get(found["tool_call_id"], message.get("name") or "")
    return found
