"""Anthropic's Messages API.

Requests: system messages apart, results of tools inside the next message of the user, a limit on every answer. Answers:
content blocks, each opened, filled and closed by events of its own; thinking blocks become `reasoning_content`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from penstock.backends.remote.chunk import (
    CallDelta,
    Chunk,
    ChunkChoice,
    ChunkDelta,
    ChunkUsage,
    CompletionDetails,
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
from penstock.backends.remote.failure import failed_stream, garbage
from penstock.backends.remote.features import Feature, Fit, Operation
from penstock.backends.remote.frames import Event

VERSION = "2023-06-01"
REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}


def messages_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Messages, system prompt and tools in Anthropic's form."""
    found: dict[str, Any] = {"messages": _messages(body["messages"])}
    system = instructions(body["messages"])
    if system:
        found["system"] = "\n\n".join(system)
    tools, choice = offered(body)
    if tools:
        found["tools"] = [_tool(tool) for tool in tools]
        found["tool_choice"] = _choice(choice)
        if body.get("parallel_tool_calls") is False and choice != "none":
            found["tool_choice"]["disable_parallel_tool_use"] = True
    return found


def _messages(messages: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Alternating turns: messages of one side in a row become one, as results of tools must be in one message."""
    found: list[dict[str, Any]] = []
    for message in turns(messages):
        role, blocks = _blocks(message)
        if not blocks:  # an answer without text, which it would refuse
            continue
        if found and found[-1]["role"] == role:
            found[-1]["content"] += blocks
        else:
            found.append({"role": role, "content": blocks})
    return found


def _blocks(message: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    text = text_of(message.get("content"))
    if message["role"] in ("tool", "function"):
        return "user", [{"type": "tool_result", "tool_use_id": message.get("tool_call_id", ""), "content": text}]
    blocks: list[dict[str, Any]] = [{"type": "text", "text": text}] if text or message["role"] == "user" else []
    blocks += [
        {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments_of(call)}
        for call in message.get("tool_calls") or ()
    ]
    return message["role"], blocks


def _tool(function: Mapping[str, Any]) -> dict[str, Any]:
    tool = {"name": function["name"], "input_schema": function.get("parameters") or {"type": "object"}}
    if function.get("description"):
        tool["description"] = function["description"]
    if function.get("strict"):
        tool["strict"] = True
    return tool


def _choice(choice: Any) -> dict[str, Any]:
    if isinstance(choice, list):
        return {"type": "tool", "name": choice[0]}
    return {"type": {"required": "any"}.get(choice, choice)}


class MessagesReader(Reader):
    """Events of a message."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: dict[int, list[Any]] = {}
        """Of each open block that is a call: its number, its input at the start, whether arguments have come."""
        self._begun = 0
        self._usage = ChunkUsage()
        self._ended = False

    def read(self, event: Event) -> Iterator[Chunk]:
        sent = json_object(event.data)
        try:
            yield from self._read(sent)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise garbage() from error

    def _read(self, sent: dict[str, Any]) -> Iterator[Chunk]:
        match sent.get("type"):
            case "message_start":
                self._count(sent["message"].get("usage") or {})
                yield Chunk(usage=self._usage)
            case "content_block_start":
                yield from self._start(int(sent["index"]), sent["content_block"])
            case "content_block_delta":
                yield from self._delta(int(sent["index"]), sent["delta"])
            case "content_block_stop":
                yield from self._stop(int(sent["index"]))
            case "message_delta":
                self._count(sent.get("usage") or {})
                reason = sent["delta"].get("stop_reason")
                if reason is not None and not self._ended:
                    self._ended = True
                    yield end_chunk(REASONS.get(reason, "stop"), self._usage)
                else:
                    yield Chunk(usage=self._usage)
            case "message_stop":
                self.done = True
            case "error":
                error = sent.get("error") or {}
                raise failed_stream(str(error.get("type") or ""), str(error.get("message") or ""))
            case _:  # `ping`, and whatever comes later
                return

    def _start(self, index: int, block: dict[str, Any]) -> Iterator[Chunk]:
        if block["type"] == "text" and block.get("text"):
            yield text_chunk(block["text"])
        elif block["type"] == "tool_use":
            number, self._begun = self._begun, self._begun + 1
            self._calls[index] = [number, block.get("input") or {}, False]
            yield _call(CallDelta(number, block["id"], FunctionDelta(block["name"], "")))

    def _delta(self, index: int, delta: dict[str, Any]) -> Iterator[Chunk]:
        match delta.get("type"):
            case "text_delta":
                yield text_chunk(delta["text"])
            case "thinking_delta":
                yield Chunk([ChunkChoice(delta=ChunkDelta(reasoning_content=delta["thinking"]))])
            case "input_json_delta" if delta["partial_json"] and index in self._calls:
                call = self._calls[index]
                call[2] = True
                yield _call(CallDelta(call[0], None, FunctionDelta(None, delta["partial_json"])))
            case _:
                return

    def _stop(self, index: int) -> Iterator[Chunk]:
        """A call whose arguments did not come in pieces has them at its start, or none."""
        call = self._calls.pop(index, None)
        if call is not None and not call[2]:
            yield _call(CallDelta(call[0], None, FunctionDelta(None, encode(call[1]).decode())))

    def _count(self, usage: dict[str, Any]) -> None:
        if usage.get("input_tokens") is not None:
            cached = usage.get("cache_read_input_tokens") or 0
            self._usage.prompt_tokens = usage["input_tokens"] + cached + (usage.get("cache_creation_input_tokens") or 0)
            self._usage.prompt_tokens_details = PromptDetails(cached)
        if usage.get("output_tokens") is not None:
            self._usage.completion_tokens = usage["output_tokens"]
        if (thought := (usage.get("output_tokens_details") or {}).get("thinking_tokens")) is not None:
            self._usage.completion_tokens_details = CompletionDetails(thought)


def _think(sent: dict[str, Any], body: Mapping[str, Any]) -> None:
    """How much to think: a budget, or an effort. Calls of earlier turns would have to come with their signed thoughts,
    which are not kept."""
    effort, budget = body.get("reasoning_effort"), body.get("thinking_budget")
    if any(message.get("tool_calls") for message in body["messages"]):
        pass
    elif body.get("thinking") is not None:
        sent["thinking"] = {name: value for name, value in body["thinking"].items() if value is not None}
    elif effort == "none" or budget == 0:
        sent["thinking"] = {"type": "disabled"}
    elif budget is not None:
        sent["thinking"] = {"type": "enabled", "budget_tokens": budget}
    if effort not in (None, "none"):
        effort = "low" if effort == "minimal" else effort
        sent["output_config"] = {**sent.get("output_config", {}), "effort": effort}


def _call(delta: CallDelta) -> Chunk:
    return Chunk([ChunkChoice(delta=ChunkDelta(tool_calls=[delta]))])


class Anthropic(Dialect):
    """Anthropic, and servers with its Messages API."""

    name = "anthropic"
    features: ClassVar[frozenset[Feature]] = frozenset(
        (
            *("chat", "tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning"),
            *("continue_final_message", "tokenize_chat"),
        )
    )
    parameters: ClassVar[frozenset[str] | None] = frozenset(
        (
            *("temperature", "top_p", "top_k", "tools", "tool_choice", "parallel_tool_calls", "response_format"),
            *("continue_final_message", "reasoning_effort", "thinking", "thinking_budget"),
        )
    )

    def fit(self, body: Mapping[str, Any], operation: Operation = "chat") -> Fit:
        found = super().fit(body, operation)
        kind = (found.body.get("response_format") or {}).get("type", "text")
        if kind not in ("text", "json_schema"):
            return Fit(found.body, (*found.refused, "response_format"), found.ignored)
        return found

    @property
    def base(self) -> str:
        return f"{self.upstream.root}/v1"

    def sign(self, call: Call) -> dict[str, str]:
        headers = {"content-type": "application/json", "anthropic-version": self.upstream.api_version or VERSION}
        key = self.key.value()
        return {**headers, **call.headers, **({"x-api-key": key} if key else {})}

    def call(self, operation: Operation, body: Mapping[str, Any]) -> Call:
        sent = messages_body(body)
        sent |= {"model": self.upstream.model, "max_tokens": limit_of(body) or self.upstream.max_tokens, "stream": True}
        sent |= {name: body[name] for name in ("temperature", "top_p") if body.get(name) is not None}
        if (body.get("top_k") or 0) > 0:
            sent["top_k"] = body["top_k"]
        stops = stops_of(body)
        if stops:
            sent["stop_sequences"] = stops
        wanted = body.get("response_format") or {}
        if wanted.get("type") == "json_schema":
            schema = wanted["json_schema"].get("schema") or {}
            sent["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
        _think(sent, body)
        return Call(f"{self.base}/messages", encode(sent), {"accept": "text/event-stream"})

    def reader(self, operation: Operation, body: Mapping[str, Any]) -> Reader:
        return MessagesReader()

    def count_call(self, body: Mapping[str, Any]) -> Call:
        if "messages" not in body:  # it counts whole requests only
            raise self._missing("tokenize")
        return Call(f"{self.base}/messages/count_tokens", encode({"model": self.upstream.model, **messages_body(body)}))

    def count(self, data: bytes) -> TokenCount:
        return TokenCount(int(json_object(data).get("input_tokens") or 0))

    def health_call(self) -> Call:
        return Call(f"{self.base}/models")
