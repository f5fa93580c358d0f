"""Input items as chat messages. A call joins the assistant's message before it, as in chat completions, so that the
same conversation has the same prompt in both APIs. Calls of every kind are function calls, named as the model knows
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from penstock.gateway.api.openai.responses.schemas import (
    LOGPROBS,
    ActionCallItem,
    AdditionalToolsItem,
    CallItem,
    CallOutputItem,
    CompactionItem,
    CustomCallItem,
    FileSearchCallItem,
    InputText,
    LocalShellOutputItem,
    MessageItem,
    OutputText,
    PatchCallItem,
    PatchOutputItem,
    PlainText,
    ReasoningItem,
    ReferenceItem,
    Refusal,
    ResponsesRequest,
    ShellOutputItem,
)
from penstock.gateway.api.openai.responses.tools import OfferedTools, qualified
from penstock.gateway.api.sealed_text import SUMMARY, opened
from penstock.gateway.app.decoding import decode
from penstock.gateway.app.exchange import Exchange, encode_json
from penstock.gateway.generation.request_decoder import RequestDecoder, ignore_advice
from penstock.gateway.generation.schemas import (
    ChatMessage,
    ChatRequest,
    Sampling,
)
from penstock.gateway.generation.tool_schemas import (
    FunctionCall,
    ToolCall,
)
from penstock.gateway.rag.vector_stores.file_search import NAME as FILE_SEARCH
from penstock.gateway.rag.vector_stores.file_search import recalled
from penstock.protocol.errors import InvalidRequest
from penstock.tools import free_text

FOREIGN = frozenset(
    ("web_search_call", "code_interpreter_call", "image_generation_call")
    + ("computer_call", "computer_call_output", "mcp_list_tools", "mcp_call", "mcp_approval_request")
    + ("mcp_approval_response", "tool_search_call", "tool_search_output", "program", "program_output")
    + ("configuration_update",)
)
"""Items that only the server that made them can read, or that say what a tool of such a server did."""
REFERENCE = "item_reference"
NOTES = "Notes on the earlier part of this conversation:"
"""What introduces the summary of a compacted conversation to the model."""


class _Kind(msgspec.Struct):
    type: str | None = None
    role: Any = None
    id: Any = None


_kind = msgspec.json.Decoder(_Kind)
_message = RequestDecoder(MessageItem)
_reference = RequestDecoder(ReferenceItem)
_additional_tools = RequestDecoder(AdditionalToolsItem)
_call = RequestDecoder(CallItem)
_custom_call = RequestDecoder(CustomCallItem)
_action_call = RequestDecoder(ActionCallItem)
_patch_call = RequestDecoder(PatchCallItem)
_reasoning = RequestDecoder(ReasoningItem)
_compaction = RequestDecoder(CompactionItem)
_output = RequestDecoder(CallOutputItem)
_local_shell_output = RequestDecoder(LocalShellOutputItem)
_shell_output = RequestDecoder(ShellOutputItem)
_patch_output = RequestDecoder(PatchOutputItem)
_file_search_call = RequestDecoder(FileSearchCallItem)
SHARED = frozenset(Sampling.__struct_fields__) - {"max_tokens", "n", "stream", "stream_options", "response_format"}
"""Parameters that mean the same in chat completions and are passed on as they are."""
THINKING = (
    *("reasoning", "reasoning_effort", "enable_thinking", "thinking_budget", "thinking_token_budget"),
    *("max_reasoning_tokens", "chat_template_kwargs"),
)
"""The same, as far as only chats have them."""


def chat_request(request: ResponsesRequest, conversation: list[ChatMessage], tools: OfferedTools) -> ChatRequest:
    """The request as a chat request. Instructions are for this answer only, and not part of the conversation."""
    messages = conversation
    if request.instructions is not None:
        messages = [ChatMessage(role="system", content=request.instructions), *conversation]
    definitions = tools.definitions()
    wanted = None if request.text is None else request.text.response_format()
    return ChatRequest(
        **{name: getattr(request, name) for name in SHARED},
        messages=messages,
        tools=definitions,
        tool_choice=tools.choice(request.tool_choice),
        parallel_tool_calls=None if definitions is None else request.parallel_tool_calls,
        response_format=wanted or request.response_format,
        logprobs=True if LOGPROBS in (request.include or ()) else None,
        top_logprobs=request.top_logprobs,
        rag=request.rag,
        **{name: getattr(request, name) for name in THINKING},
    )


def rename_ignored(exchange: Exchange) -> None:
    """What a chat request ignored, in the words of this API."""
    exchange.ignored[:] = [
        "input.reasoning" if name == "messages.reasoning_content" else name for name in exchange.ignored
    ]


def kind_of(raw: msgspec.Raw, at: str) -> str:
    """The type of an item; without one, it is a message or a reference."""
    kind = decode(_kind, raw, at)
    if kind.type is not None:
        return kind.type
    return REFERENCE if kind.role is None and kind.id is not None else "message"


def reference_of(exchange: Exchange, raw: msgspec.Raw, at: str) -> str:
    return _reference(exchange, raw, at).id


def conversation_of(
    exchange: Exchange, given: str | Sequence[msgspec.Raw], earlier: Sequence[ChatMessage], tools: OfferedTools
) -> list[ChatMessage]:
    """The earlier conversation and what `input` adds to it. Items may also offer `tools`."""
    if isinstance(given, str):
        return [*earlier, ChatMessage(role="user", content=given)]
    reader = _ItemReader(exchange, earlier, tools)
    for index, raw in enumerate(given):
        at = f"input[{index}]"
        kind = kind_of(raw, at)
        if (read := reader.kinds.get(kind)) is not None:
            read(raw, at)
        elif kind in FOREIGN:
            ignore_advice(exchange, f"input.{kind}")
        else:
            raise InvalidRequest(
                f"Items of type `{kind[:64]}` are not supported; there are {', '.join(reader.kinds)}.",
                param=f"{at}.type",
                code="unsupported_parameter",
            )
    return reader.finish()


class _ItemReader:
    """Adds items to a conversation, one by one."""

    def __init__(self, exchange: Exchange, earlier: Sequence[ChatMessage], tools: OfferedTools) -> None:
        self._exchange = exchange
        self._tools = tools
        self.messages = list(earlier)
        self._known = {call.id for message in earlier for call in message.tool_calls or ()}
        self._calls = set(self._known)
        self._thought = ""
        """What was thought before the next item of the assistant."""
        self._ids: dict[str, str] = {}
        """Ids of calls by the ids of their items."""
        self.kinds: dict[str, Callable[[msgspec.Raw, str], None]] = {
            "message": self._message,
            "reasoning": self._reasoning,
            "compaction": self._compaction,
            "function_call": self._function_call,
            "function_call_output": self._output,
            "custom_tool_call": self._custom_call,
            "custom_tool_call_output": self._output,
            "local_shell_call": self._action_call,
            "local_shell_call_output": self._local_shell_output,
            "shell_call": self._action_call,
            "shell_call_output": self._shell_output,
            "apply_patch_call": self._patch_call,
            "apply_patch_call_output": self._patch_output,
            "file_search_call": self._file_search_call,
            "additional_tools": self._additional_tools,
        }

    def _message(self, raw: msgspec.Raw, at: str) -> None:
        message = _message(self._exchange, raw, at)
        if message.role != "assistant":
            self._drop_thought()
        thought = self._take_thought()
        self.messages.append(ChatMessage(role=message.role, content=_text(message.content), reasoning_content=thought))

    def _reasoning(self, raw: msgspec.Raw, at: str) -> None:
        item = _reasoning(self._exchange, raw, at)
        parts = (part.get("text") for part in item.content or ())
        thought = "".join(part for part in parts if isinstance(part, str)) or opened(item.encrypted_content)
        if thought:
            self._thought = "\n\n".join(filter(None, (self._thought, thought)))
        elif item.encrypted_content or item.summary:
            ignore_advice(self._exchange, "input.reasoning")

    def _compaction(self, raw: msgspec.Raw, at: str) -> None:
        item = _compaction(self._exchange, raw, at)
        if summary := opened(item.encrypted_content, SUMMARY):
            self.messages.append(ChatMessage(role="system", content=f"{NOTES}\n{summary}"))
        else:
            ignore_advice(self._exchange, "input.compaction")

    def _take_thought(self) -> str | None:
        thought, self._thought = self._thought, ""
        return thought or None

    def _drop_thought(self) -> None:
        """Nothing that the assistant said came of it."""
        if self._take_thought():
            ignore_advice(self._exchange, "input.reasoning")

    def _additional_tools(self, raw: msgspec.Raw, at: str) -> None:
        self._tools.add(_additional_tools(self._exchange, raw, at).tools, f"{at}.tools")

    # --- calls

    def _function_call(self, raw: msgspec.Raw, at: str) -> None:
        call = _call(self._exchange, raw, at)
        self._add_call(call.call_id, call.id, qualified(call.name, call.namespace), call.arguments)

    def _custom_call(self, raw: msgspec.Raw, at: str) -> None:
        call = _custom_call(self._exchange, raw, at)
        self._add_call(call.call_id, call.id, qualified(call.name, call.namespace), free_text.arguments(call.input))

    def _action_call(self, raw: msgspec.Raw, at: str) -> None:
        call = _action_call(self._exchange, raw, at)
        action = {name: value for name, value in call.action.items() if name != "type" and value not in (None, {})}
        self._add_call(call.call_id, call.id, call.type.removesuffix("_call"), encode_json(action).decode())

    def _patch_call(self, raw: msgspec.Raw, at: str) -> None:
        call = _patch_call(self._exchange, raw, at)
        self._add_call(call.call_id, call.id, "apply_patch", encode_json(call.operation).decode())

    def _add_call(self, call_id: str, item_id: str | None, name: str, arguments: str) -> None:
        if item_id is not None:
            self._ids[item_id] = call_id
        if call_id in self._known:  # sent again before its result
            return
        self._calls.add(call_id)
        call = ToolCall(id=call_id, function=FunctionCall(name=name, arguments=arguments))
        add_call(self.messages, call, self._take_thought())

    def _file_search_call(self, raw: msgspec.Raw, at: str) -> None:
        """A search and its results, if the client has kept them; what was said after it is there in any case."""
        call = _file_search_call(self._exchange, raw, at)
        if call.results is None:
            ignore_advice(self._exchange, "input.file_search_call")
            return
        id = call.id or f"fs_{len(self.messages)}"
        if id in self._known:
            return
        self._add_call(id, None, FILE_SEARCH, encode_json({"queries": call.queries}).decode())
        self._add_result(id, recalled(msgspec.to_builtins(call.results)), at)

    # --- results

    def _output(self, raw: msgspec.Raw, at: str) -> None:
        result = _output(self._exchange, raw, at)
        self._add_result(result.call_id, _text(result.output), at)

    def _local_shell_output(self, raw: msgspec.Raw, at: str) -> None:
        result = _local_shell_output(self._exchange, raw, at)
        call_id = result.call_id or result.id or ""
        self._add_result(self._ids.get(call_id, call_id), result.output, at)

    def _shell_output(self, raw: msgspec.Raw, at: str) -> None:
        result = _shell_output(self._exchange, raw, at)
        self._add_result(result.call_id, encode_json(result.output).decode(), at)

    def _patch_output(self, raw: msgspec.Raw, at: str) -> None:
        result = _patch_output(self._exchange, raw, at)
        self._add_result(result.call_id, "\n".join(filter(None, (result.status, result.output))), at)

    def _add_result(self, call_id: str, text: str, at: str) -> None:
        if call_id not in self._calls:
            raise InvalidRequest(
                f"`{at}.call_id` answers no call: no call before it has the id {call_id!r}.", param=f"{at}.call_id"
            )
        self._drop_thought()
        self.messages.append(ChatMessage(role="tool", tool_call_id=call_id, content=text))

    def finish(self) -> list[ChatMessage]:
        """The conversation, when all items have been read."""
        self._drop_thought()
        return self.messages


def add_call(messages: list[ChatMessage], call: ToolCall, thought: str | None = None) -> None:
    """Add a call to the last message of the assistant, or as a new one: a thought before it begins one."""
    if not messages or messages[-1].role != "assistant" or thought:
        messages.append(ChatMessage(role="assistant", reasoning_content=thought))
    last = messages[-1]
    messages[-1] = msgspec.structs.replace(last, tool_calls=[*(last.tool_calls or ()), call])


def _text(content: str | Sequence[InputText | PlainText | OutputText | Refusal]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, Refusal) else part.text for part in content)
