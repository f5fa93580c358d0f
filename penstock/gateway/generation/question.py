"""What a request asks and what the model will read for it, as far as the choice of a model depends on it.

It is made only for requests that name a route or limit their cost: making one costs a pass over the conversation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from penstock.gateway.generation.chat_messages import Message, template_messages
from penstock.gateway.generation.sampling import TokenLimit
from penstock.gateway.generation.schemas import ChatRequest, RagRequest
from penstock.gateway.generation.turn import STATELESS, Turn


class Question(Struct, frozen=True, kw_only=True):
    """See above."""

    said: Sequence[str]
    """What the user says, oldest first."""
    read: Sequence[str]
    """Everything that the model will read, as far as it is known before the choice: system prompt, history, the user's
    messages, results of tools, definitions of tools, documents."""
    ids: int = 0
    """Tokens of prompts that the request gives as token ids."""
    messages: int = 0
    """Messages in the conversation: a template adds some tokens to each."""
    max_tokens: int | None = None
    """Of each answer, as far as the request says it."""
    usual_tokens: int | None = None
    """Of each answer, where the request says nothing: the server's own default."""
    choices: int = 1
    local: bool = False
    """Only a model that runs here can answer it."""
    rag: RagRequest | None = None
    """Sources that will be read too."""

    @property
    def text(self) -> str:
        """The last message of the user."""
        return self.said[-1] if self.said else ""


def chat_question(request: ChatRequest, limit: TokenLimit, turn: Turn = STATELESS) -> Question:
    """`turn`: the stored conversation that the request belongs to, if any."""
    messages = [*turn.history, *template_messages(request.messages, turn.calls)]
    read = [text for message in messages for text in _texts(message)]
    for tool in request.tools or ():
        function = tool.function
        read += [function.name, function.description or "", *_strings(function.parameters or {})]
    read += [*_strings(request.documents or ()), *_strings(request.chat_template_kwargs or {})]
    return Question(
        said=[message["content"] for message in messages if message["role"] == "user" and message["content"]],
        read=read,
        messages=len(messages),
        max_tokens=limit.max_tokens,
        usual_tokens=limit.default,
        choices=request.n or 1,
        local=request.prompt_logprobs is not None,
        rag=request.rag,
    )


def prompt_question(
    prompts: Sequence[str | list[int]], limit: TokenLimit, choices: int = 1, *, local: bool = False
) -> Question:
    """Of a request for completions; `choices`: answers to each of the prompts."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    return Question(
        said=texts,
        read=texts,
        ids=sum(len(prompt) for prompt in prompts if not isinstance(prompt, str)),
        max_tokens=limit.max_tokens,
        usual_tokens=limit.default,
        choices=choices * max(len(prompts), 1),
        local=local,
    )


def _texts(message: Message) -> Iterator[str]:
    yield message["content"] or ""
    if len(message) > 2:
        for call in message.get("tool_calls") or ():
            yield from _strings(call.get("function") or {})


def _strings(value: Any) -> Iterator[str]:
    """All strings in a JSON value, keys included; numbers as they are written."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
    elif value is not None:
        yield str(value)
