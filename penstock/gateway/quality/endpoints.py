"""POST /v1/feedback: rate an answer; GET /v1/admin/feedback: the ratings of all users."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated

import msgspec

from penstock.gateway.accounting.attribution import identify
from penstock.gateway.app.decoding import decode, decode_query
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.app.store_access import store_of
from penstock.gateway.generation.permissions import Permissions
from penstock.gateway.quality.feedback import Feedback, Rating, Selection
from penstock.metering.ledger import LedgerError
from penstock.metering.reports import moment
from penstock.protocol.errors import InvalidRequest, NotFound, sentence

COMMENT = 4000
"""The most characters of a comment."""


class FeedbackRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A vote on an answer."""

    response_id: Annotated[str, msgspec.Meta(max_length=256)]
    rating: Rating
    comment: Annotated[str, msgspec.Meta(max_length=COMMENT)] | None = None
    user: Annotated[str, msgspec.Meta(max_length=256)] | None = None


class FeedbackQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    since: str | None = None
    tenant: str | None = None
    model: str | None = None
    route: str | None = None
    rating: Rating | None = None
    via: str | None = None
    arm: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 100


_decoder = msgspec.json.Decoder(FeedbackRequest)


class FeedbackEndpoints:
    """Votes on answers."""

    def __init__(
        self,
        feedback: Feedback,
        permissions: Permissions,
        suspect: Callable[[str, str], Awaitable[object]],
        body_limit: int,
    ) -> None:
        self._feedback = feedback
        self._permissions = permissions
        self._suspect = suspect
        self._body_limit = body_limit

    async def give_feedback(self, exchange: Exchange) -> None:
        request = decode(_decoder, await exchange.body(self._body_limit))
        identify(exchange, request.user, None)
        user, comment = ((text or "").replace("\0", "") for text in (exchange.record.user_id, request.comment))
        with store_of("feedback"):
            vote = await self._feedback.vote(
                exchange.caller.tenant,
                user,
                request.response_id,
                request.rating,
                comment,
                only_user=exchange.caller.only_user,
                sees=partial(self._permissions.sees_answer, exchange.caller),
            )
        if vote is None:
            raise NotFound(f"There is no answer `{request.response_id[:128]}` to vote on.", param="response_id")
        if request.rating == "down":
            await self._suspect(exchange.caller.tenant, request.response_id)
        await exchange.reply_json(vote.shown())

    async def list_feedback(self, exchange: Exchange) -> None:
        asked = decode_query(FeedbackQuery, exchange.scope)
        try:
            since = None if asked.since is None else moment(asked.since)
        except LedgerError as error:
            raise InvalidRequest(sentence(error), param="since") from error
        only = Selection(since, asked.tenant, asked.model, asked.route, asked.rating, asked.via, asked.arm)
        with store_of("feedback"):
            votes, totals = await self._feedback.votes(only, asked.limit), await self._feedback.totals(only)
        await exchange.reply_json({"object": "list", "data": [vote.shown() for vote in votes], "totals": totals})
