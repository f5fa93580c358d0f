"""How many tokens a prompt has for a remote model: by its configured tokenizer, by its server, or as an estimate.

Invariant: a count that is an estimate says so; nothing else is passed off as exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.chat_messages import Message
from penstock.gateway.generation.estimates import estimated_text
from penstock.gateway.generation.prompt import MessagePrompt
from penstock.gateway.generation.prompt_options import USUAL, PromptOptions
from penstock.gateway.generation.tokenization import Tokenization, most_counted
from penstock.gateway.generation.tokenized_model import remote_text
from penstock.gateway.generation.tool_choice import tool_of
from penstock.gateway.generation.tool_schemas import (
    ToolDefinition,
)
from penstock.protocol.errors import DataRuleForbids, EngineUnavailable, Overloaded
from penstock.routing.remotes import RemoteModel

ESTIMATED = (b"x-penstock-estimated", b"tokens")
"""The header of a reply whose count is an estimate."""


class RemoteCount(Struct, frozen=True):
    """The length of a prompt."""

    count: int
    tokens: list[int] | None = None
    """None: they are not known."""
    estimated: bool = False


async def count_remote(
    exchange: Exchange,
    model: RemoteModel,
    tokenization: Tokenization,
    *,
    text: str = "",
    messages: Sequence[Message] | None = None,
    tools: Sequence[ToolDefinition] = (),
    options: PromptOptions = USUAL,
    add_special_tokens: bool = True,
) -> RemoteCount:
    """The tokens of `text`, or of `messages` where they are given."""
    caller, known = exchange.caller, remote_text(model)
    if known is not None and (messages is None or known.text.has_chat_template or options.template):
        most = most_counted(known)
        if messages is None:
            tokens = await tokenization.encode(
                known, text, tenant=caller.tenant, most=most, add_special_tokens=add_special_tokens
            )
        else:
            offered = tuple(map(tool_of, tools))
            tokens = await tokenization.encode_chat(
                known, list(messages), tenant=caller.tenant, most=most, tools=offered, options=options
            )
        return RemoteCount(len(tokens), tokens)
    if model.supports("tokenize" if messages is None else "tokenize_chat"):
        body: dict[str, Any] = {"prompt": text} if messages is None else {"messages": list(messages)}
        if tools:
            body["tools"] = msgspec.to_builtins(tools)
        try:
            told = await model.count(body, exchange.request_id, exchange.demand)
        except (EngineUnavailable, Overloaded, DataRuleForbids):
            pass  # an estimate is better than nothing
        else:
            return RemoteCount(told.count, told.tokens)
    exchange.extra_headers.append(ESTIMATED)
    if messages is None:
        return RemoteCount(estimated_text(text) if text else 0, estimated=True)
    prompt = MessagePrompt(tokenization, model, tools, caller.tenant)
    return RemoteCount(await prompt.measured(list(messages)), estimated=True)
