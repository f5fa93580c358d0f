"""Amazon Bedrock: the Converse API, signed with Signature Version 4.

Credentials: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or a shared credentials file (`key_file`),
or a Bedrock API key (`key_env`), which is sent as a bearer token and needs no signature.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar
from urllib.parse import quote

from penstock.backends.remote.chunk import (
    CallDelta,
    Chunk,
    ChunkChoice,
    ChunkDelta,
    ChunkUsage,
    FunctionDelta,
    PromptDetails,
    TokenCount,
    end_chunk,
    text_chunk,
)
from penstock.backends.remote.conversation import (
    arguments_of,
    instructions,
    limit_of,
    offered,
    stops_of,
    text_of,
    turns,
)
from penstock.backends.remote.dialect import Call, Dialect, Reader, encode, json_object
from penstock.backends.remote.event_stream import EventStreamFrames
from penstock.backends.remote.failure import error_details, failed_stream, garbage, refusal
from penstock.backends.remote.features import Feature, Fit, Operation
from penstock.backends.remote.frames import Event, WholeFrames
from penstock.backends.remote.sigv4 import AwsCredentials, from_environment, from_profile, sign
from penstock.backends.remote.upstream import Upstream
from penstock.errors import ConfigError
from penstock.protocol.errors import ApiError, InvalidRequest

SERVICE = "bedrock"
REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "guardrail_intervened": "content_filter",
    "content_filtered": "content_filter",
}
STATUS = {
    "ThrottlingException": 429,
    "ServiceQuotaExceededException": 429,
    "ModelNotReadyException": 429,
    "ServiceUnavailableException": 503,
    "ModelTimeoutException": 504,
    "ModelErrorException": 502,
    "ValidationException": 400,
    "AccessDeniedException": 403,
    "UnrecognizedClientException": 403,
    "ExpiredTokenException": 403,
    "ResourceNotFoundException": 404,
}
"""Meaning of Amazon's exceptions, whose own status codes are not always telling."""


class ConverseReader(Reader):
    """Messages of a conversation's stream."""

    def __init__(self) -> None:
        super().__init__(EventStreamFrames())
        self._calls: dict[int, list[Any]] = {}
        """Of each open block that is a call: its number, and whether arguments have come."""
        self._begun = 0

    def read(self, event: Event) -> Iterator[Chunk]:
        if event.kind.startswith("!"):
            said = error_details(event.data)[0] or event.data.decode("utf-8", "replace")
            raise failed_stream(event.kind[1:], said)
        try:
            yield from self._read(event.kind, json_object(event.data))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise garbage() from error

    def _read(self, kind: str, sent: dict[str, Any]) -> Iterator[Chunk]:
        match kind:
            case "contentBlockStart":
                use = (sent.get("start") or {}).get("toolUse")
                if use is not None:
                    number, self._begun = self._begun, self._begun + 1
                    self._calls[sent["contentBlockIndex"]] = [number, False]
                    yield _call(CallDelta(number, use["toolUseId"], FunctionDelta(use["name"], "")))
            case "contentBlockDelta":
                yield from self._delta(sent["contentBlockIndex"], sent["delta"])
            case "contentBlockStop":
                call = self._calls.pop(sent["contentBlockIndex"], None)
                if call is not None and not call[1]:
                    yield _call(CallDelta(call[0], None, FunctionDelta(None, "{}")))
            case "messageStop":
                yield end_chunk(REASONS.get(sent.get("stopReason") or "", "stop"))
            case "metadata":
                self.done = True
                yield Chunk(usage=read_usage(sent.get("usage") or {}))
            case _:
                return

    def _delta(self, index: int, delta: dict[str, Any]) -> Iterator[Chunk]:
        if delta.get("text"):
            yield text_chunk(delta["text"])
        elif delta.get("reasoningContent", {}).get("text"):
            yield Chunk([ChunkChoice(delta=ChunkDelta(reasoning_content=delta["reasoningContent"]["text"]))])
        elif delta.get("toolUse", {}).get("input") and index in self._calls:
            call = self._calls[index]
            call[1] = True
            yield _call(CallDelta(call[0], None, FunctionDelta(None, delta["toolUse"]["input"])))


class WholeReader(Reader):
    """An answer of Converse, which is not streamed."""

    def __init__(self) -> None:
        super().__init__(WholeFrames())

    def read(self, event: Event) -> Iterator[Chunk]:
        sent = json_object(event.data)
        try:
            calls = 0
            for block in sent["output"]["message"]["content"]:
                if block.get("text"):
                    yield text_chunk(block["text"])
                elif block.get("reasoningContent"):
                    thought = block["reasoningContent"].get("reasoningText", {}).get("text")
                    yield Chunk([ChunkChoice(delta=ChunkDelta(reasoning_content=thought))])
                elif block.get("toolUse"):
                    use = block["toolUse"]
                    made = FunctionDelta(use["name"], encode(use.get("input") or {}).decode())
                    yield _call(CallDelta(calls, use["toolUseId"], made))
                    calls += 1
            yield end_chunk(REASONS.get(sent.get("stopReason") or "", "stop"), read_usage(sent.get("usage") or {}))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise garbage() from error
        self.done = True


def read_usage(usage: Mapping[str, Any]) -> ChunkUsage:
    cached = usage.get("cacheReadInputTokens") or 0
    read = (usage.get("inputTokens") or 0) + cached + (usage.get("cacheWriteInputTokens") or 0)
    return ChunkUsage(read, usage.get("outputTokens") or 0, PromptDetails(cached))


def _call(delta: CallDelta) -> Chunk:
    return Chunk([ChunkChoice(delta=ChunkDelta(tool_calls=[delta]))])


def conversation(body: Mapping[str, Any]) -> dict[str, Any]:
    """Messages, system prompt and tools in the form of Converse."""
    messages: list[dict[str, Any]] = []
    for message in turns(body["messages"]):
        role, blocks = _blocks(message)
        if not blocks:  # an answer without text, which it would refuse
            continue
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += blocks
        else:
            messages.append({"role": role, "content": blocks})
    found: dict[str, Any] = {"messages": messages}
    system = instructions(body["messages"])
    if system:
        found["system"] = [{"text": text} for text in system]
    tools, choice = offered(body)
    if choice == "none":
        if any(message.get("tool_calls") for message in body["messages"]):
            raise InvalidRequest(
                "This model cannot be kept from calling tools in a conversation that has calls already.",
                param="tool_choice",
                code="unsupported_parameter",
            )
        tools = []
    if tools:
        found["toolConfig"] = {"tools": [{"toolSpec": _tool(tool)} for tool in tools], "toolChoice": _choice(choice)}
    return found


def _blocks(message: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    text = text_of(message.get("content"))
    if message["role"] in ("tool", "function"):
        return "user", [{"toolResult": {"toolUseId": message.get("tool_call_id", ""), "content": [{"text": text}]}}]
    blocks: list[dict[str, Any]] = [{"text": text}] if text or message["role"] == "user" else []
    blocks += [
        {"toolUse": {"toolUseId": call["id"], "name": call["function"]["name"], "input": arguments_of(call)}}
        for call in message.get("tool_calls") or ()
    ]
    return message["role"], blocks


def _tool(function: Mapping[str, Any]) -> dict[str, Any]:
    tool = {"name": function["name"], "inputSchema": {"json": function.get("parameters") or {"type": "object"}}}
    return tool | ({"description": function["description"]} if function.get("description") else {})


def _choice(choice: Any) -> dict[str, Any]:
    if isinstance(choice, list):
        return {"tool": {"name": choice[0]}}
    return {"any" if choice == "required" else "auto": {}}


class Bedrock(Dialect):
    """Amazon Bedrock's runtime."""

    name = "bedrock"
    features: ClassVar[frozenset[Feature]] = frozenset(
        ("chat", "tools", "tool_choice", "reasoning", "continue_final_message", "tokenize_chat")
    )
    parameters: ClassVar[frozenset[str] | None] = frozenset(
        ("temperature", "top_p", "tools", "tool_choice", "continue_final_message")
    )

    def __init__(self, upstream: Upstream) -> None:
        super().__init__(upstream)
        named = re.search(r"bedrock-runtime(?:-fips)?\.([a-z0-9-]+)\.", upstream.url)
        self.region = (
            upstream.aws_region
            or (named.group(1) if named else "")
            or os.environ.get("AWS_REGION", "")
            or os.environ.get("AWS_DEFAULT_REGION", "")
        )

    def check(self) -> None:
        self.key.check()
        if not self.upstream.key_env:
            self._credentials()
            if not self.region:
                raise ConfigError(f"the region of {self.upstream.url} is not known; set aws_region")

    def _credentials(self) -> AwsCredentials:
        if not self.upstream.key_file:
            return from_environment()
        found = from_profile(self.key.value())
        if found is None:
            raise ConfigError(f"{self.upstream.key_file} has no complete AWS credentials")
        return found

    def fit(self, body: Mapping[str, Any], operation: Operation = "chat") -> Fit:
        found = super().fit(body, operation)
        strict = any(tool["function"].get("strict") for tool in found.body.get("tools") or ())
        return Fit(found.body, found.refused, (*found.ignored, *(("tools.strict",) if strict else ())))

    def sign(self, call: Call) -> dict[str, str]:
        headers = {"content-type": "application/json", **call.headers}
        if self.upstream.key_env:
            return {**headers, "authorization": f"Bearer {self.key.value()}"}
        method = "GET" if call.content is None else "POST"
        return sign(
            method, call.url, headers, call.content or b"", self._credentials(), region=self.region, service=SERVICE
        )

    def call(self, operation: Operation, body: Mapping[str, Any]) -> Call:
        sent = conversation(body)
        limits: dict[str, Any] = {"maxTokens": limit_of(body) or self.upstream.max_tokens}
        for name, here in (("temperature", "temperature"), ("top_p", "topP")):
            if body.get(name) is not None:
                limits[here] = body[name]
        stops = stops_of(body)
        if stops:
            limits["stopSequences"] = stops
        sent["inferenceConfig"] = limits
        if not self.upstream.streamed:
            return Call(self._url("converse"), encode(sent), {"accept": "application/json"})
        return Call(self._url("converse-stream"), encode(sent), {"accept": "application/vnd.amazon.eventstream"})

    def reader(self, operation: Operation, body: Mapping[str, Any]) -> Reader:
        return ConverseReader() if self.upstream.streamed else WholeReader()

    def refusal(self, status: int, headers: Mapping[str, str], body: bytes) -> ApiError:
        kind = headers.get("x-amzn-errortype", "").partition(":")[0].rpartition("#")[2]
        return refusal(STATUS.get(kind, status), headers, body)

    def count_call(self, body: Mapping[str, Any]) -> Call:
        if "messages" not in body:  # it counts whole requests only
            raise self._missing("tokenize")
        sent = conversation(body)
        sent.pop("toolConfig", None)
        return Call(self._url("count-tokens"), encode({"input": {"converse": sent}}))

    def count(self, data: bytes) -> TokenCount:
        return TokenCount(int(json_object(data).get("inputTokens") or 0))

    def health_call(self) -> Call:
        """There is no cheap request; any answer shows that the service is there."""
        return Call(f"{self.upstream.url.rstrip('/')}/")

    def _url(self, action: str) -> str:
        return f"{self.upstream.url.rstrip('/')}/model/{quote(self.upstream.model, safe='')}/{action}"
