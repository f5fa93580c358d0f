"""POST /v1/messages and /v1/messages/count_tokens"""

from __future__ import annotations

import msgspec

from penstock.gateway.accounting.attribution import find_model, identify
from penstock.gateway.api.anthropic.message_blocks import NAMES, chat_request
from penstock.gateway.api.anthropic.renderer import MessageRenderer
from penstock.gateway.api.anthropic.schemas import CountTokensRequest, MessagesRequest
from penstock.gateway.app.decoding import decode
from penstock.gateway.app.dialects import renamed
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.chat_messages import template_messages
from penstock.gateway.generation.fallback import answered, said_by_users
from penstock.gateway.generation.prepare import chat_tokens, prepare_chat
from penstock.gateway.generation.respond import answer
from penstock.gateway.generation.sampling import limits
from penstock.gateway.generation.tool_choice import check_tools, toolbox_of
from penstock.gateway.process.service import Service

_messages = msgspec.json.Decoder(MessagesRequest)
_count = msgspec.json.Decoder(CountTokensRequest)


async def create_message(service: Service, exchange: Exchange) -> None:
    request = decode(_messages, await exchange.body(service.settings.body_limit))
    identify(exchange, None if request.metadata is None else request.metadata.user_id, None)
    limit = limits(request.max_tokens, service.settings, default=None, param="max_tokens")

    async def attempt(attempt: Attempt) -> None:
        with renamed(NAMES):
            chat = chat_request(msgspec.structs.replace(request, model=attempt.model))
            generation = await prepare_chat(service, attempt, chat, limit)
        renderer = MessageRenderer(generation, exchange.request_id)
        await answer(service, attempt, generation, renderer, stream=bool(request.stream))

    def said() -> list[str]:
        return said_by_users(chat_request(request).messages)

    await answered(service, exchange, request.model, attempt, said, limit.max_tokens)


async def count_tokens(service: Service, exchange: Exchange) -> None:
    request = decode(_count, await exchange.body(service.settings.body_limit))
    with renamed(NAMES):
        chat = chat_request(request)
        check_tools(chat)
        messages = template_messages(chat.messages)
        model = find_model(service.registry, exchange, request.model)
        tokens = await chat_tokens(service, model, messages, toolbox_of(chat, model))
    await exchange.reply_json({"input_tokens": len(tokens)})
