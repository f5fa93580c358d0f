"""POST /v1/responses, and GET and DELETE of those that were stored."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

import msgspec

from penstock.gateway.accounting.attribution import identify
from penstock.gateway.api.openai.responses.input_items import chat_request, conversation_of
from penstock.gateway.api.openai.responses.renderer import Keep, ResponseRenderer
from penstock.gateway.api.openai.responses.schemas import UNSUPPORTED, ResponsesRequest
from penstock.gateway.api.openai.responses.store import ResponseStore
from penstock.gateway.app.decoding import decode, given, not_supported
from penstock.gateway.app.dialects import renamed
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.conversations.turn import Recorder, open_turn
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.fallback import answered, said_by_users
from penstock.gateway.generation.prepare import prepare_chat
from penstock.gateway.generation.respond import answer
from penstock.gateway.generation.sampling import limits
from penstock.gateway.generation.schemas import ChatMessage
from penstock.gateway.process.service import Service
from penstock.protocol.errors import InvalidRequest, NotFound, ServiceUnavailable
from penstock.storage import DatabaseError

T = TypeVar("T")

_decoder = msgspec.json.Decoder(ResponsesRequest)
_NAMES = (
    (r"messages\b", "input"),
    (r"response_format\.json_schema", "text.format"),
    (r"response_format", "text.format"),
    (r"tools\[(\d+)\]\.function\.", r"tools[\1]."),
)


async def create_response(service: Service, exchange: Exchange) -> None:
    request = decode(_decoder, await exchange.body(service.settings.body_limit))
    identify(exchange, request.user or request.safety_identifier, request.metadata)
    _check(request, service.responses)
    limit = limits(
        request.max_output_tokens,
        service.settings,
        default=service.settings.default_max_tokens,
        param="max_output_tokens",
    )
    # Instructions are for one answer: they are no part of a conversation.
    async with open_turn(service, exchange, request.conversation, keep_system=False) as turn:
        if turn is None:
            earlier = await _earlier(service, exchange, request.previous_response_id)
        else:
            earlier = msgspec.convert(turn.history, list[ChatMessage])
        conversation = conversation_of(request.input, earlier)
        said = conversation if turn is None else conversation[len(earlier) :]
        keep = None if request.store is False else _keeper(service.responses, exchange.caller.tenant, conversation)

        async def attempt(attempt: Attempt) -> None:
            with renamed(_NAMES):
                chat = chat_request(msgspec.structs.replace(request, model=attempt.model), said)
                generation = await prepare_chat(service, attempt, chat, limit, turn)
            recorder = None if turn is None else Recorder(service, attempt, generation, turn)
            renderer = ResponseRenderer(request, generation, keep, recorder)
            await answer(service, attempt, generation, renderer, stream=bool(request.stream))

        def asked() -> list[str]:
            return said_by_users(chat_request(request, said).messages)

        await answered(service, exchange, request.model, attempt, asked, limit.max_tokens)


async def get_response(service: Service, exchange: Exchange) -> None:
    store, id = _stored(service, exchange)
    found = await _guard(store.response(id, exchange.caller.tenant))
    if found is None:
        raise _unknown(id)
    await exchange.reply(200, found)


async def delete_response(service: Service, exchange: Exchange) -> None:
    store, id = _stored(service, exchange)
    if not await _guard(store.delete(id, exchange.caller.tenant)):
        raise _unknown(id)
    await exchange.reply_json({"id": id, "object": "response", "deleted": True})


def _check(request: ResponsesRequest, store: ResponseStore | None) -> None:
    for name in UNSUPPORTED:
        if given(getattr(request, name)):
            raise not_supported(name)
    if request.background:
        raise not_supported("background")
    if request.text is not None and given(request.text.verbosity):
        raise not_supported("text.verbosity")
    if request.top_logprobs and not request.include:
        raise InvalidRequest(
            "`top_logprobs` needs `include` with `message.output_text.logprobs`.", param="top_logprobs"
        )
    if request.stream_options is not None:
        if request.stream_options.include_usage is not None:
            raise not_supported("stream_options.include_usage")
        if request.stream_options.include_obfuscation:
            raise not_supported("stream_options.include_obfuscation")
        if not request.stream:
            raise InvalidRequest("`stream_options` is only allowed with `stream: true`.", param="stream_options")
    if request.conversation is not None and request.previous_response_id is not None:
        raise InvalidRequest(
            "`conversation` and `previous_response_id` both say what came before; send one of them.",
            param="previous_response_id",
        )
    if store is None:
        wanted = {"store": request.store, "previous_response_id": request.previous_response_id}
        for name, value in wanted.items():
            if value:
                raise InvalidRequest(
                    f"`{name}` needs a store, and this gateway stores no responses; send the whole conversation.",
                    param=name,
                    code="unsupported_parameter",
                )


async def _earlier(service: Service, exchange: Exchange, previous: str | None) -> list[ChatMessage]:
    if previous is None or service.responses is None:
        return []
    found = await _guard(service.responses.conversation(previous, exchange.caller.tenant))
    if found is None:
        raise InvalidRequest(
            f"There is no stored response `{previous}`.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return found


def _keeper(store: ResponseStore | None, tenant: str, conversation: list[ChatMessage]) -> Keep | None:
    if store is None:
        return None

    async def keep(id: str, response: bytes, said: list[ChatMessage]) -> None:
        await _guard(store.put(id, tenant, response, [*conversation, *said]))

    return keep


def _stored(service: Service, exchange: Exchange) -> tuple[ResponseStore, str]:
    id = exchange.path.rpartition("/")[2]
    if exchange.scope["query_string"]:
        raise InvalidRequest("A stored response is shown whole; this takes no query parameters.")
    if service.responses is None:
        raise _unknown(id)
    return service.responses, id


def _unknown(id: str) -> NotFound:
    return NotFound(f"There is no stored response `{id[:128]}`.")


async def _guard(work: Awaitable[T]) -> T:
    try:
        return await work
    except DatabaseError as error:
        raise ServiceUnavailable("The store of responses cannot be reached at the moment.") from error
