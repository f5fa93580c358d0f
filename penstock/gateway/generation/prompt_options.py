"""What a request says about how its messages become a prompt, beside the messages themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from penstock.gateway.generation.schemas import ChatRequest, TokenizeRequest
from penstock.protocol.errors import InvalidRequest


class PromptOptions(Struct, frozen=True):
    """How a conversation is rendered."""

    add_generation_prompt: bool = True
    """The prompt ends with the beginning of an answer."""
    continue_final: bool = False
    """The prompt ends with the text of the last message, which the model continues."""
    template_kwargs: Mapping[str, Any] | None = None
    """Variables for the chat template."""


USUAL = PromptOptions()


def prompt_options(request: ChatRequest | TokenizeRequest) -> PromptOptions:
    """The options of a request, checked."""
    continue_final = continues(request)
    if not continue_final and request.add_generation_prompt is not False and not request.chat_template_kwargs:
        return USUAL
    if continue_final and request.add_generation_prompt:
        raise InvalidRequest(
            "`add_generation_prompt` begins a new answer, and `continue_final_message` continues the last message; "
            "send one of them.",
            param="add_generation_prompt",
        )
    return PromptOptions(
        add_generation_prompt=not continue_final and request.add_generation_prompt is not False,
        continue_final=continue_final,
        template_kwargs=request.chat_template_kwargs,
    )


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
