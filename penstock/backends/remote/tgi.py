"""Text Generation Inference: its Messages API for chat, `/generate_stream` for completions.

It leaves stop strings at the end of an answer; they are cut off here. `/generate_stream` sends one token per event,
also special ones, and tells in the last event why it ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from penstock.backends.remote.chunk import (
    Chunk,
    ChunkChoice,
    ChunkDelta,
    ChunkLogprobs,
    ChunkUsage,
    EmbeddingBatch,
    TokenCount,
    TokenOdds,
    end_chunk,
)
from penstock.backends.remote.conversation import limit_of, prompt_of, stops_of
from penstock.backends.remote.dialect import Call, Reader, decode, encode, json_object
from penstock.backends.remote.failure import failed_stream, garbage
from penstock.backends.remote.features import Feature, Fit, Operation
from penstock.backends.remote.features import fit as fit_fields
from penstock.backends.remote.frames import Event
from penstock.backends.remote.load import LoadMetrics
from penstock.backends.remote.open_servers import OpenServer
from penstock.backends.remote.openai import ChatReader
from penstock.protocol.errors import EngineUnavailable
from penstock.text.stop_strings import StopStrings

REASONS = {"length": "length", "eos_token": "stop", "stop_sequence": "stop", "stop": "stop", "tool_calls": "tool_calls"}
PARAMETERS = {
    "top_k": "top_k",
    "top_p": "top_p",
    "typical_p": "typical_p",
    "repetition_penalty": "repetition_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "truncate_prompt_tokens": "truncate",
}


class GenerateReader(Reader):
    """Events of `/generate_stream`."""

    def __init__(self, stops: Sequence[str], *, logprobs: bool) -> None:
        super().__init__()
        self._stops = StopStrings(stops)
        self._logprobs = logprobs

    def read(self, event: Event) -> Iterator[Chunk]:
        sent = json_object(event.data)
        if sent.get("error"):
            raise failed_stream(str(sent.get("error_type") or ""), str(sent["error"]))
        try:
            yield from self._read(sent)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise garbage() from error

    def _read(self, sent: dict[str, Any]) -> Iterator[Chunk]:
        token = sent["token"]
        shown = "" if token.get("special") else self._stops.push(token["text"])[0]
        odds = None
        if self._logprobs and not token.get("special"):
            odds = ChunkLogprobs([_odds(token, sent.get("top_tokens") or ())])
        if shown or odds:
            yield Chunk([ChunkChoice(0, ChunkDelta(shown), odds)])
        details = sent.get("details")
        if sent.get("generated_text") is not None or details:
            self.done = True
            details = details or {}
            held = self._stops.flush()
            if held:
                yield Chunk([ChunkChoice(0, ChunkDelta(held))])
            usage = ChunkUsage(details.get("input_length") or 0, details.get("generated_tokens") or 0)
            yield end_chunk(REASONS.get(details.get("finish_reason") or "", "stop"), usage)


def _odds(token: dict[str, Any], tops: Sequence[dict[str, Any]]) -> TokenOdds:
    return TokenOdds(
        token["text"],
        float(token.get("logprob") or 0.0),
        None,
        [TokenOdds(top["text"], float(top.get("logprob") or 0.0)) for top in tops],
    )


class TgiChatReader(ChatReader):
    """Chat chunks of all its versions: older ones send a call as an object where OpenAI sends a list."""

    def __init__(self, stops: Sequence[str]) -> None:
        super().__init__()
        self._stops = StopStrings(stops)

    def read(self, event: Event) -> Iterator[Chunk]:
        if event.data != b"[DONE]":
            event = Event(event.kind, _repaired(event.data))
        for chunk in super().read(event):
            for choice in chunk.choices:
                choice.delta.content = self._stops.push(choice.delta.content or "")[0] or None
                if choice.finish_reason is not None:
                    choice.delta.content = ((choice.delta.content or "") + self._stops.flush()) or None
                    choice.finish_reason = REASONS.get(choice.finish_reason, "stop")
            yield chunk


def _repaired(data: bytes) -> bytes:
    if b'"tool_calls":{' not in data and b'"error_type"' not in data and b'"arguments":{' not in data:
        return data
    try:
        sent = decode(data)
        if "error_type" in sent:
            return encode({"error": {"message": sent.get("error"), "type": sent["error_type"]}})
        for choice in sent["choices"]:
            calls = choice["delta"].get("tool_calls")
            calls = [calls] if isinstance(calls, dict) else calls
            for call in calls or ():
                if isinstance(call["function"].get("arguments"), dict):
                    call["function"]["arguments"] = encode(call["function"]["arguments"]).decode()
            choice["delta"]["tool_calls"] = calls
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise garbage() from error
    return encode(sent)


class Tgi(OpenServer):
    name = "tgi"
    features: ClassVar[frozenset[Feature]] = frozenset(
        (
            *("chat", "completions", "tools", "tool_choice", "logprobs", "top_logprobs", "seed", "response_format"),
            "tokenize",
        )
    )
    metrics = LoadMetrics(("tgi_batch_current_size",), ("tgi_queue_size",))
    CHAT: ClassVar[frozenset[str]] = frozenset(
        (
            *("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "response_format", "tools"),
            *("tool_choice", "logprobs", "top_logprobs"),
        )
    )
    TEXT: ClassVar[frozenset[str]] = frozenset((*PARAMETERS, "temperature", "logprobs", "response_format"))
    parameters: ClassVar[frozenset[str] | None] = CHAT | TEXT

    def fit(self, body: Mapping[str, Any], operation: Operation = "chat") -> Fit:
        found = fit_fields(body, self.CHAT if operation == "chat" else self.TEXT)
        kind = (found.body.get("response_format") or {}).get("type", "text")
        known = ("text", "json_schema") if operation == "completions" else ("text", "json_object", "json_schema")
        refused = found.refused if kind in known else (*found.refused, "response_format")
        strict = any(tool["function"].get("strict") for tool in found.body.get("tools") or ())
        return Fit(found.body, refused, (*found.ignored, *(("tools.strict",) if strict else ())))

    def call(self, operation: Operation, body: Mapping[str, Any]) -> Call:
        if operation == "chat":
            return super().call(operation, body)
        return Call(
            f"{self.upstream.root}/generate_stream",
            encode({"inputs": prompt_of(body), "parameters": self._parameters(body)}),
            {"accept": "text/event-stream"},
        )

    def _parameters(self, body: Mapping[str, Any]) -> dict[str, Any]:
        sent = {there: body[here] for here, there in PARAMETERS.items() if body.get(here) is not None}
        sent |= {"details": True, "max_new_tokens": limit_of(body) or self.upstream.max_tokens}
        if sent.get("top_p") == 1:  # values that switch an option off are outside of its range here
            del sent["top_p"]
        if sent.get("top_k", 1) <= 0:
            del sent["top_k"]
        if sent.get("typical_p") == 1:
            del sent["typical_p"]
        temperature = body.get("temperature", 1.0)
        sent["do_sample"] = bool(temperature)
        if temperature:
            sent["temperature"] = temperature
        stops = stops_of(body)
        if stops:
            sent["stop"] = stops
        if body.get("logprobs"):
            sent["top_n_tokens"] = body["logprobs"]
        wanted = body.get("response_format") or {}
        if wanted.get("type") == "json_schema":
            sent["grammar"] = {"type": "json", "value": wanted["json_schema"].get("schema") or {}}
        return sent

    def reader(self, operation: Operation, body: Mapping[str, Any]) -> Reader:
        if operation == "chat":
            return TgiChatReader(stops_of(body))
        return GenerateReader(stops_of(body), logprobs=body.get("logprobs") is not None)

    def embed_call(self, texts: Sequence[str], dimensions: int | None = None) -> Call:
        raise self._missing("embeddings")

    def embeddings(self, data: bytes) -> EmbeddingBatch:
        raise self._missing("embeddings")

    def count_call(self, body: Mapping[str, Any]) -> Call:
        if "messages" in body:
            raise self._missing("tokenize_chat")
        sent = {"inputs": prompt_of(body), "add_special_tokens": body.get("add_special_tokens", True)}
        return Call(f"{self.upstream.root}/tokenize", encode(sent))

    def count(self, data: bytes) -> TokenCount:
        try:
            found = msgspec.convert(decode(data), list[dict[str, Any]])
            return TokenCount(len(found), [int(token["id"]) for token in found])
        except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, ValueError) as error:
            raise EngineUnavailable(
                "The remote server of this model sent an invalid token count; try again."
            ) from error
