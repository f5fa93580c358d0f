"""POST /v1/responses, and GET and DELETE of those that were stored."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

import msgspec

from penstock.gateway.accounting.attribution import identify
from penstock.gateway.api.openai.responses.input_items import chat_request, conversation_of
from penstock.gateway.api.openai.responses.renderer import ResponseRenderer, StoreResponse
from penstock.gateway.api.openai.responses.schemas import LOGPROBS, UNSUPPORTED, ResponsesRequest
from penstock.gateway.api.openai.responses.store import NoResponseStore, ResponseStore
from penstock.gateway.app.decoding import given, not_supported
from penstock.gateway.app.dialects import renamed
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.chat_messages import user_texts
from penstock.gateway.generation.pipeline import GenerationPipeline
from penstock.gateway.generation.request_decoder import RequestDecoder, ignore_advice
from penstock.gateway.generation.resumption import asked_for
from penstock.gateway.generation.sampling import token_limit
from penstock.gateway.generation.schemas import ChatMessage
from penstock.gateway.generation.turn import Conversations
from penstock.protocol.errors import InvalidRequest, NotFound, ServiceUnavailable
from penstock.storage import DatabaseError

T = TypeVar("T")

_decoder = RequestDecoder(ResponsesRequest)
_NAMES = (
    (r"messages\b", "input"),
    (r"response_format\.json_schema", "text.format"),
    (r"response_format", "text.format"),
    (r"tools\[(\d+)\]\.function\.", r"tools[\1]."),
)


class ResponseEndpoints:
    def __init__(
        self, pipeline: GenerationPipeline, conversations: Conversations, store: ResponseStore | NoResponseStore
    ) -> None:
        self._pipeline = pipeline
        self._conversations = conversations
        self._store = store

    async def create_response(self, exchange: Exchange) -> None:
        pipeline, settings = self._pipeline, self._pipeline.settings
        request = _decoder(exchange, await exchange.body(settings.body_limit))
        identify(exchange, request.user or request.safety_identifier, request.metadata)
        _check(request, can_store=self._store.enabled)
        for name in request.include or ():
            if name != LOGPROBS:  # other items that could be included are never made here
                ignore_advice(exchange, f"include.{name}")
        limit = token_limit(
            request.max_output_tokens, settings, default=settings.default_max_tokens, param="max_output_tokens"
        )
        resumption = asked_for(exchange, stream=request.stream, conversation=request.conversation)
        # Instructions are for one answer: they are no part of a conversation.
        async with self._conversations.open(exchange, request.conversation, keep_system=False) as turn:
            if turn.stored:
                earlier = msgspec.convert(turn.history, list[ChatMessage])
            else:
                earlier = await self._earlier(exchange, request.previous_response_id)
            conversation = conversation_of(exchange, request.input, earlier)
            said = conversation[len(earlier) :] if turn.stored else conversation
            store = self._storing(exchange, conversation) if request.store is not False else None

            async def answer(attempt: Attempt) -> None:
                attempt.resumption = resumption
                with renamed(_NAMES):
                    chat = chat_request(msgspec.structs.replace(request, model=attempt.model), said)
                    generation = await pipeline.chat(attempt, chat, limit, turn)
                renderer = ResponseRenderer(request, generation, turn.recorder(attempt, generation), store)
                await pipeline.respond(attempt, generation, renderer, stream=bool(request.stream))

            def texts() -> list[str]:
                return user_texts(chat_request(request, said).messages)

            await pipeline.answer(exchange, request.model, answer, texts, limit.max_tokens)

    async def get_response(self, exchange: Exchange) -> None:
        id = _stored_id(exchange)
        found = await _guard(self._store.response(id, exchange.caller.tenant, exchange.caller.only_user))
        if found is None:
            raise _unknown(id)
        await exchange.reply(200, found)

    async def delete_response(self, exchange: Exchange) -> None:
        id = _stored_id(exchange)
        if not await _guard(self._store.delete(id, exchange.caller.tenant, exchange.caller.only_user)):
            raise _unknown(id)
        await exchange.reply_json({"id": id, "object": "response", "deleted": True})

    async def _earlier(self, exchange: Exchange, previous: str | None) -> list[ChatMessage]:
        """The conversation of an earlier response."""
        if previous is None:
            return []
        found = await _guard(self._store.conversation(previous, exchange.caller.tenant, exchange.caller.only_user))
        if found is None:
            raise InvalidRequest(
                f"There is no stored response `{previous}`.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return found

    def _storing(self, exchange: Exchange, conversation: list[ChatMessage]) -> StoreResponse | None:
        """Stores a response; None where responses are not stored."""
        if not self._store.enabled:
            return None
        tenant, user = exchange.caller.tenant, exchange.record.user_id or ""

        async def store(id: str, response: bytes, said: list[ChatMessage]) -> None:
            await _guard(self._store.put(id, tenant, response, [*conversation, *said], user=user))

        return store


def _check(request: ResponsesRequest, *, can_store: bool) -> None:
    for name in UNSUPPORTED:
        if given(getattr(request, name)):
            raise not_supported(name)
    if request.background:
        raise not_supported("background")
    if request.top_logprobs and LOGPROBS not in (request.include or ()):
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
    if not can_store:
        wanted = {"store": request.store, "previous_response_id": request.previous_response_id}
        for name, value in wanted.items():
            if value:
                raise InvalidRequest(
                    f"`{name}` needs a store, and this gateway stores no responses; send the whole conversation.",
                    param=name,
                    code="unsupported_parameter",
                )


def _stored_id(exchange: Exchange) -> str:
    if exchange.scope["query_string"]:
        raise InvalidRequest("A stored response is shown whole; this takes no query parameters.")
    return exchange.path.rpartition("/")[2]


def _unknown(id: str) -> NotFound:
    return NotFound(f"There is no stored response `{id[:128]}`.")


async def _guard(work: Awaitable[T]) -> T:
    try:
        return await work
    except DatabaseError as error:
        raise ServiceUnavailable("The store of responses cannot be reached at the moment.") from error
