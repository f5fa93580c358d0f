"""POST /v1/moderations, in OpenAI's format: what the configured guardrails say about texts. Each rule is a category."""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from penstock.gateway.accounting.quotas import Quotas
from penstock.gateway.app.exchange import ClientDisconnected, Exchange
from penstock.gateway.generation.request_decoder import RequestDecoder
from penstock.gateway.generation.schemas import Name
from penstock.gateway.moderation.guardrails import Guardrails, Judgement
from penstock.gateway.moderation.moderators import FAILURES
from penstock.protocol.errors import DataRuleForbids, InvalidRequest, ModelNotFound, NotFound, ServiceUnavailable

log = logging.getLogger(__name__)

MOST_CHARACTERS = 256_000
"""Of all texts of a request: a moderation model reads every one."""
CHARACTERS_PER_TOKEN = 4
"""For limits: which tokenizer reads the texts depends on the rule."""
ALL = frozenset(("omni-moderation-latest", "text-moderation-latest", "text-moderation-stable"))
"""Names that OpenAI's clients send by default: all rules judge."""


class TextPart(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str


class ImagePart(Struct, tag_field="type", tag="image_url"):
    """Refused with a reason."""


class ModerationsRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/moderations"""

    input: str | Annotated[list[str | TextPart | ImagePart], Meta(min_length=1, max_length=256)]
    model: Name | None = None
    """A guardrail; every one that applies to the caller when not given."""


_decoder = RequestDecoder(ModerationsRequest)


class ModerationEndpoints:
    """Judges texts by the guardrails of the caller."""

    def __init__(self, guardrails: Guardrails, quotas: Quotas, body_limit: int) -> None:
        self._guardrails = guardrails
        self._quotas = quotas
        self._body_limit = body_limit

    async def moderations(self, exchange: Exchange) -> None:
        request = _decoder(exchange, await exchange.body(self._body_limit))
        texts = _texts(request)
        names = self._guardrails.judges(exchange)
        if not names:
            raise NotFound("No guardrail of this server applies to you; see `guardrails` in its configuration.")
        if request.model is not None and request.model not in ALL:
            if request.model not in names:
                raise ModelNotFound(request.model, [*names, *ALL])
            names = [request.model]
        size = sum(map(len, texts))
        async with self._quotas.text_work(exchange, "moderation", size, only=True) as work:
            work.tokens = size // CHARACTERS_PER_TOKEN
            results = await self._judged(exchange, texts, names)
        model = request.model if request.model is not None else "omni-moderation-latest"
        await exchange.reply_json({"id": f"modr-{uuid.uuid4().hex}", "model": model, "results": results})

    async def _judged(self, exchange: Exchange, texts: list[str], names: list[str]) -> list[dict[str, Any]]:
        async def judge() -> list[dict[str, Any]]:
            return [_result(await self._guardrails.judgement(exchange, text, names)) for text in texts]

        task = asyncio.create_task(judge(), name="moderation")
        left = False

        def leave(error: Exception) -> None:
            nonlocal left
            left = True
            task.cancel()

        with exchange.watched(leave):
            try:
                return await task
            except asyncio.CancelledError:
                task.cancel()
                if left:
                    raise ClientDisconnected from None
                raise
            except DataRuleForbids:
                raise
            except FAILURES as error:  # its message may quote the text
                log.warning("a moderation model could not be asked: %s", type(error).__name__)
                raise ServiceUnavailable(
                    "The moderation model of this server does not answer; try again.", code="moderation_unavailable"
                ) from None


def _texts(request: ModerationsRequest) -> list[str]:
    """OpenAI's rule: strings are judged one by one, parts together as one input."""
    given = request.input
    if isinstance(given, str):
        texts = [given]
    elif all(isinstance(item, str) for item in given):
        texts = [item for item in given if isinstance(item, str)]
    else:
        texts = ["\n".join(_part(item) for item in given)]
    size = sum(map(len, texts))
    if size > MOST_CHARACTERS:
        raise InvalidRequest(
            f"`input` has {size:,} characters; at most {MOST_CHARACTERS:,} go in one request.", param="input"
        )
    return texts


def _part(item: str | TextPart | ImagePart) -> str:
    if isinstance(item, ImagePart):
        raise InvalidRequest("Images cannot be judged here; send text.", param="input", code="unsupported_parameter")
    return item if isinstance(item, str) else item.text


def _result(judgements: list[Judgement]) -> dict[str, Any]:
    kinds: list[Literal["text"]] = ["text"]
    return {
        "flagged": any(each.refused for each in judgements),
        "categories": {each.rule: each.matches for each in judgements},
        "category_scores": {each.rule: each.score for each in judgements},
        "category_applied_input_types": {each.rule: kinds for each in judgements},
    }
