"""Requests of Ollama's API as chat and completion requests. Translated once; the models of a fallback chain share the
result."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.gateway.api.ollama.schemas import (
    ADVICE,
    NEUTRAL,
    Answered,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    Options,
    Sampled,
)
from penstock.gateway.app.decoding import not_supported
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.request_decoder import ignore_advice
from penstock.gateway.generation.schemas import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
)
from penstock.gateway.generation.tool_schemas import (
    FunctionCall,
    ToolCall,
    ToolDefinition,
)
from penstock.protocol.errors import InvalidRequest

NAMES = (
    (r"response_format.*", "format"),
    (r"max_(completion_)?tokens", "options.num_predict"),
    (r"repetition_penalty", "options.repeat_penalty"),
    (r"(temperature|top_k|top_p|min_p|seed|stop|presence_penalty|frequency_penalty)$", r"options.\1"),
)
"""Parameters that chat requests call differently; see `renamed`."""
ROLES = ("system", "user", "assistant", "tool")


def chat_request(exchange: Exchange, request: OllamaChatRequest) -> ChatRequest:
    """A conversation; what of it has no effect is noted for the header."""
    note_advice(exchange, request)
    chat = ChatRequest(
        model=request.model,
        messages=_History(request.messages or []).messages,
        logprobs=request.logprobs,
        top_logprobs=request.top_logprobs,
    )
    if request.tools:
        chat.tools = [ToolDefinition(type="function", function=tool.function) for tool in request.tools]
    _sample(chat, request)
    return chat


def prompt_request(exchange: Exchange, request: OllamaGenerateRequest) -> ChatRequest:
    """A single prompt, put into the chat template."""
    note_advice(exchange, request)
    _check(request)
    messages = [ChatMessage(role="system", content=request.system)] if request.system else []
    messages.append(ChatMessage(role="user", content=request.prompt))
    chat = ChatRequest(
        model=request.model, messages=messages, logprobs=request.logprobs, top_logprobs=request.top_logprobs
    )
    _sample(chat, request)
    return chat


def completion_request(exchange: Exchange, request: OllamaGenerateRequest) -> CompletionRequest:
    """A prompt that is continued as it is (`raw`, or a model without a chat template), or up to `suffix`."""
    note_advice(exchange, request)
    _check(request)
    if request.system:
        raise InvalidRequest("`system` needs a chat template; write it into `prompt`.", param="system")
    completion = CompletionRequest(model=request.model, prompt=request.prompt or "", suffix=request.suffix or None)
    if request.logprobs:
        completion.logprobs = request.top_logprobs or 0
    _sample(completion, request)
    return completion


def asked_tokens(request: Answered) -> int | None:
    """How many tokens are wanted; None: as many as fit."""
    wanted = None if request.options is None else request.options.num_predict
    if wanted is None:
        wanted = request.max_tokens or request.max_output_tokens
    return wanted if wanted is not None and wanted > 0 else None


def note_advice(exchange: Exchange, request: Any) -> None:
    """Names what is advisory and not followed."""
    names = [name for name in ("keep_alive", "shift") if getattr(request, name, None) is not None]
    if getattr(request, "truncate", None) and isinstance(request, Answered):
        names.append("truncate")
    options = request.options
    if options is not None:
        names += [f"options.{name}" for name in ADVICE if getattr(options, name) is not None]
        if options.repeat_last_n not in (None, 0, -1):
            names.append("options.repeat_last_n")
        for name, neutral in NEUTRAL.items():
            if (value := getattr(options, name)) is not None:
                if value not in neutral:
                    raise not_supported(f"options.{name}")
                names.append(f"options.{name}")
    for name in names:
        ignore_advice(exchange, name)


def _check(request: OllamaGenerateRequest) -> None:
    if request.images:
        raise _images("images")
    for name, instead in (
        ("template", "The model's own template is used; `raw: true` uses none."),
        ("context", "Send the conversation to /api/chat."),
    ):
        if getattr(request, name):
            error = not_supported(name)
            error.message = f"{error.message} {instead}"
            raise error


def _images(param: str) -> InvalidRequest:
    return InvalidRequest(
        "Images are not supported: the models served here read text only.", param=param, code="unsupported_parameter"
    )


def _sample(chat: ChatRequest | CompletionRequest, request: Answered) -> None:
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("`top_logprobs` needs `logprobs: true`.", param="top_logprobs")
    if request.format == "json":
        chat.response_format = JsonObjectFormat()
    elif request.format:
        assert isinstance(request.format, dict)
        chat.response_format = JsonSchemaFormat(JsonSchema(name="format", schema=request.format))
    options = request.options or Options()
    for name in Sampled.__struct_fields__:
        within = getattr(options, name)
        setattr(chat, name, getattr(request, name) if within is None else within)
    chat.typical_p = options.typical_p
    if options.repeat_last_n != 0:
        chat.repetition_penalty = options.repeat_penalty


def no_thoughts(request: Answered) -> InvalidRequest:
    """For a model that does not think."""
    return InvalidRequest(
        f"`{request.model}` does not support thinking; leave `think` out.",
        param="think",
        code="unsupported_parameter",
    )


def think(chat: ChatRequest, request: Answered) -> None:
    """Tell a model that thinks whether, or how much."""
    if isinstance(request.think, bool):
        chat.enable_thinking = request.think
    else:
        chat.reasoning_effort = request.think


class _History:
    """Messages with calls and results under ids, which are optional in this API: a result without one that is
    known answers the oldest open call, of its `tool_name` where it has one."""

    def __init__(self, given: list[OllamaMessage]) -> None:
        self._open: list[tuple[str, str]] = []
        """Ids and names of calls without a result."""
        self._calls = 0
        self.messages = [self._message(message, f"messages[{at}]") for at, message in enumerate(given)]

    def _message(self, message: OllamaMessage, at: str) -> ChatMessage:
        role = message.role.lower()
        if role not in ROLES:
            raise InvalidRequest(f"`{at}.role` must be one of {', '.join(ROLES)}.", param=f"{at}.role")
        if message.images:
            raise _images(f"{at}.images")
        turned = ChatMessage(role=role, content=message.content or "")  # type: ignore[arg-type]
        if role == "assistant":
            turned.thinking = message.thinking
        if role == "tool":
            turned.tool_call_id = self._answered(message, at)
        elif message.tool_calls:
            turned.tool_calls = [self._call(call.id, call.function) for call in message.tool_calls]
        return turned

    def _call(self, id: str | None, function: Any) -> ToolCall:
        self._calls += 1
        id = id or f"call_{self._calls}"
        self._open.append((id, function.name))
        arguments = msgspec.json.encode(function.arguments).decode()
        return ToolCall(id=id, function=FunctionCall(name=function.name, arguments=arguments))

    def _answered(self, message: OllamaMessage, at: str) -> str:
        for index, (id, _) in enumerate(self._open):
            if id == message.tool_call_id:
                return self._open.pop(index)[0]
        # Some clients keep the ids of results and drop those of calls.
        for index, (_, name) in enumerate(self._open):
            if message.tool_name in (None, "", name):
                return self._open.pop(index)[0]
        raise InvalidRequest(f"`{at}` answers no call: no `tool_calls` before it fits.", param=at)
