"""POST /v1/responses/compact: a conversation in less space, for a client that goes on with it.

What comes back are the user's messages as they were and one item with a summary of everything, which the model writes.
A client sends these items in the place of the conversation; the summary is then a system message (`input_items`). The
model reads the conversation under its own limits: what does not fit its window, from the oldest on, is left out of the
summary, and `x-penstock-context` says so.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.gateway.accounting.attribution import identify
from penstock.gateway.api.openai.responses.input_files import with_file_texts
from penstock.gateway.api.openai.responses.input_items import chat_request, conversation_of, rename_ignored
from penstock.gateway.api.openai.responses.item_ids import output_id
from penstock.gateway.api.openai.responses.references import ResponseReferences
from penstock.gateway.api.openai.responses.renderer import usage_of
from penstock.gateway.api.openai.responses.schemas import CompactRequest
from penstock.gateway.api.openai.responses.tools import OfferedTools
from penstock.gateway.api.sealed_text import SUMMARY, sealed
from penstock.gateway.app.dialects import renamed
from penstock.gateway.app.exchange import Exchange, encode_json
from penstock.gateway.conversations.truncation import TruncatedTurn
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.chat_messages import template_messages
from penstock.gateway.generation.choice import Piece
from penstock.gateway.generation.input_files import InputFiles
from penstock.gateway.generation.pipeline import GenerationPipeline
from penstock.gateway.generation.question import Question, chat_question
from penstock.gateway.generation.renderer import Renderer
from penstock.gateway.generation.request_decoder import RequestDecoder
from penstock.gateway.generation.sampling import token_limit
from penstock.gateway.generation.schemas import ChatMessage
from penstock.protocol.errors import InvalidRequest, ServerError

SUMMARY_TOKENS = 1024
"""Most tokens of a summary, unless the window has fewer."""
TASK = (
    "Summarise this conversation for yourself: you will go on with it from your summary and the user's messages alone. "
    "Keep what was asked for, what was decided and found out, with all names, numbers, places and code that are still "
    "needed, the results of tools, and what remains to be done. Write the summary only."
)
_NAMES = ((r"messages\b", "input"),)
_decoder = RequestDecoder(CompactRequest)


class CompactionEndpoints:
    """Summaries of conversations."""

    def __init__(self, pipeline: GenerationPipeline, references: ResponseReferences, files: InputFiles) -> None:
        self._files = files
        self._pipeline = pipeline
        self._references = references

    async def compact_response(self, exchange: Exchange) -> None:
        pipeline, settings = self._pipeline, self._pipeline.settings
        asked = _decoder(exchange, await exchange.body(settings.body_limit))
        identify(exchange, None, None)
        tools = OfferedTools(exchange, None)
        conversation = await self._references.earlier(exchange, asked.previous_response_id)
        if asked.input is not None:
            items = await self._references.resolved(exchange, asked.input)
            read = await with_file_texts(exchange, self._files, items, asked.model)
            conversation = conversation_of(exchange, read, conversation, tools)
        if not conversation:
            raise InvalidRequest(
                "There is nothing to compact: send `input`, `previous_response_id`, or both.", param="input"
            )
        head = next((i for i, said in enumerate(conversation) if said.role not in ("system", "developer")), 0)
        history = template_messages(conversation[head:])
        if pipeline.content_filter.checks_input:
            history = await pipeline.content_filter.messages(exchange, history)
        turn = TruncatedTurn(history)
        limit = token_limit(None, settings, default=SUMMARY_TOKENS, param="max_output_tokens")
        request, task = asked.request(), [*conversation[:head], ChatMessage(role="user", content=TASK)]

        async def answer(attempt: Attempt) -> None:
            with renamed(_NAMES):
                chat = chat_request(msgspec.structs.replace(request, model=attempt.model), task, tools)
                generation = await pipeline.chat(attempt, chat, limit, turn)
                rename_ignored(exchange)
            await pipeline.respond(attempt, generation, CompactionRenderer(generation, conversation), stream=False)

        def question() -> Question:
            return chat_question(chat_request(request, task, tools), limit, turn)

        await pipeline.answer(exchange, request.model, answer, question)


class CompactionRenderer(Renderer):
    """`response.compaction` objects, which are never streamed."""

    def __init__(self, generation: Generation, conversation: Sequence[ChatMessage]) -> None:
        self._generation = generation
        self._said = [message for message in conversation if message.role == "user"]
        self._head = {
            "id": f"resp_{generation.id}",
            "object": "response.compaction",
            "created_at": int(time.time()),
            "model": generation.model.name,
        }

    def whole(self, pieces: list[list[Piece]]) -> bytes:
        summary = "".join(piece.text for piece in pieces[0]).strip()
        if not summary:
            raise ServerError("The model wrote no summary of the conversation.")
        items = [_user_item(message, self._id("msg", index)) for index, message in enumerate(self._said)]
        compaction = {
            "id": self._id("cmp", len(items)),
            "type": "compaction",
            "encrypted_content": sealed(summary, SUMMARY),
        }
        usage = usage_of(self._generation.usage(), self._generation.cached_tokens)
        return encode_json({**self._head, "output": [*items, compaction], "usage": usage})

    def _id(self, kind: str, index: int) -> str:
        return output_id(kind, self._generation.id, index)

    def opening(self) -> bytes:
        raise NotImplementedError("a compaction is never streamed")

    def event(self, piece: Piece) -> bytes:
        raise NotImplementedError("a compaction is never streamed")

    def closing(self) -> bytes:
        raise NotImplementedError("a compaction is never streamed")


def _user_item(message: ChatMessage, id: str) -> dict[str, Any]:
    text = template_messages([message])[0]["content"]
    part = {"type": "input_text", "text": text}
    return {"id": id, "type": "message", "role": "user", "status": "completed", "content": [part]}
