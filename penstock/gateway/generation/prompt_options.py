"""What a request says about how its messages become a prompt, beside the messages themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from penstock.gateway.generation.sampling import TokenLimit
from penstock.gateway.generation.schemas import ChatRequest, TokenizeRequest
from penstock.protocol.errors import InvalidRequest, sentence
from penstock.text import ChatTemplateError, TextModel

UNLIMITED_ANSWER = 512
"""Tokens that a prompt truncated to the window leaves free for an answer that names no limit."""


class PromptOptions(Struct, frozen=True):
    """How a conversation is rendered."""

    add_generation_prompt: bool = True
    """The prompt ends with the beginning of an answer."""
    continue_final: bool = False
    """The prompt ends with the text of the last message, which the model continues."""
    template_kwargs: Mapping[str, Any] | None = None
    """Variables for the chat template."""
    template: str = ""
    """A chat template to use instead of the model's own."""
    last: int | None = None
    """Keep only so many tokens at the end of the prompt."""


USUAL = PromptOptions()


def prompt_options(
    request: ChatRequest | TokenizeRequest, *, allow_template: bool = False, last: int | None = None
) -> PromptOptions:
    """The options of a request, checked. `allow_template`: whether a request may bring a chat template. `last`: see
    `kept_tokens`."""
    if request.chat_template and not allow_template:
        raise InvalidRequest(
            "`chat_template` is not accepted: this server renders messages with the model's own template only "
            "(`generation.request_chat_templates` would allow others).",
            param="chat_template",
            code="unsupported_parameter",
        )
    continue_final = continues(request)
    if continue_final and request.add_generation_prompt:
        raise InvalidRequest(
            "`add_generation_prompt` begins a new answer, and `continue_final_message` continues the last message; "
            "send one of them.",
            param="add_generation_prompt",
        )
    kwargs = request.chat_template_kwargs or {}
    if request.documents:
        kwargs = {**kwargs, "documents": request.documents}
    options = PromptOptions(
        add_generation_prompt=not continue_final and request.add_generation_prompt is not False,
        continue_final=continue_final,
        template_kwargs=kwargs or None,
        template=request.chat_template or "",
        last=last,
    )
    return USUAL if options == USUAL else options


def known_names(text: TextModel, template: str | None) -> frozenset[str]:
    """The variables that the chat template expects: the model's, or the one that the request brings."""
    if not template:
        return text.template_names
    try:
        return text.other_template(template).names
    except ChatTemplateError as error:
        raise InvalidRequest(sentence(error), param="chat_template") from error


def kept_tokens(asked: int | None, window: int, limit: TokenLimit) -> int | None:
    """How many tokens of a prompt `truncate_prompt_tokens` keeps; None: all."""
    if asked is None or asked > 0:
        return asked
    if asked == 0:
        raise InvalidRequest("`truncate_prompt_tokens` must be at least 1, or -1.", param="truncate_prompt_tokens")
    answer = limit.max_tokens or min(limit.default or UNLIMITED_ANSWER, window // 4)
    return max(window - answer, 1)


def continues(request: ChatRequest | TokenizeRequest) -> bool:
    """Whether the answer continues the last message, in whichever way the request says it."""
    messages = request.messages or []
    for index, message in enumerate(messages[:-1]):
        if message.prefix or message.partial:
            name = f"messages[{index}].{'prefix' if message.prefix else 'partial'}"
            raise InvalidRequest(f"`{name}` goes with the last message, which the answer continues.", param=name)
    last = messages[-1] if messages else None
    marked = last is not None and bool(last.prefix or last.partial)
    if not marked and not request.continue_final_message:
        return False
    if last is None or last.role != "assistant":
        raise InvalidRequest(
            "`continue_final_message` needs a last message with the role `assistant`, whose text the answer continues.",
            param="messages" if request.messages is None else f"messages[{len(messages) - 1}].role",
        )
    if last.tool_calls:
        raise InvalidRequest(
            "The last message makes tool calls, so there is no text to continue.",
            param=f"messages[{len(messages) - 1}].tool_calls",
        )
    return True
