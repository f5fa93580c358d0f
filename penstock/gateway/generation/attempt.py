"""One attempt to answer a request with one model of its fallback chain: the routing state that the exchange, which is
HTTP only, does not know.

Invariant: whatever the attempt holds (a time slice of its model) is released when the attempt ends, however it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.gateway.accounting.answer_ids import AnswerIds
from penstock.gateway.accounting.attribution import note_model
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.resumption import Resumption
from penstock.gateway.generation.trial import Trial
from penstock.protocol.errors import DataRuleForbids, EngineUnavailable, Overloaded, ServerError
from penstock.routing.registry import AnsweringModel

FAILURES = (EngineUnavailable, Overloaded, ServerError, DataRuleForbids)
"""Errors after which another model is asked. A data rule: what was found for the request must not get to this one."""


class Attempt:
    """See above. `model`: the name of the model that is asked. `reason`: why it is asked, when it is not simply the
    one that the client named. `is_fallback`: another model failed before. `has_fallback`: if this model cannot answer
    now another one is asked, so there is no need to wait for it. `committed`: tools have run, and would run again if
    another model began anew. `route`: why the model that answers was taken, once
    that is known."""

    __slots__ = (
        *("_headers", "_release", "exchange", "has_fallback", "ids", "is_fallback", "model", "reason"),
        *("committed", "resumption", "route", "trial"),
    )

    def __init__(
        self,
        exchange: Exchange,
        model: str,
        ids: AnswerIds,
        *,
        reason: str = "",
        is_fallback: bool = False,
        has_fallback: bool = False,
        trial: Trial | None = None,
    ) -> None:
        self.exchange = exchange
        self.model = model
        self.ids = ids
        self.reason = reason
        self.route = ""
        self.resumption: Resumption | None = None
        """Set where the client may resume the stream, or does."""
        self.trial = trial
        """Its part in an experiment; none where it is not the arm that answers."""
        self.is_fallback = is_fallback
        self.has_fallback = has_fallback
        self.committed = False
        self._headers = len(exchange.extra_headers)
        self._release: Callable[[], None] | None = None

    @property
    def patient(self) -> bool:
        """Whether to wait for an engine that is away: nobody else can give this answer, or the rest of it."""
        return not self.has_fallback or self.committed or self.exchange.response_started

    @property
    def replaceable(self) -> bool:
        """Whether another model may answer in its place, if this one fails now."""
        return self.has_fallback and not self.committed and not self.exchange.response_started

    def hold(self, release: Callable[[], None] | None) -> None:
        """Call `release` when the attempt ends, or before the next step of its answer."""
        self._release = release

    def release(self) -> None:
        if self._release is not None:
            self._release()
            self._release = None

    def withdraw(self) -> None:
        """Forget a failed attempt: the headers it set and the tokens it recorded."""
        self.release()
        del self.exchange.extra_headers[self._headers :]
        record = self.exchange.record
        record.prompt_tokens = record.cached_tokens = record.completion_tokens = 0
        record.finish_reason = None

    def note_model(self, asked: str, model: AnsweringModel, why: str) -> None:
        """Record which model answers; `why` where the attempt itself has no reason."""
        why = self.reason or why
        self.route = self.route or why
        note_model(self.exchange, asked, model.name, why, base_name=model.base_name, adapter=model.adapter)

    def note_replica(self, name: str, where: Mapping[str, str]) -> None:
        """Tell the client which replica runs the request, and where that is."""
        headers = self.exchange.extra_headers
        headers.append((b"x-penstock-replica", name.encode("latin-1", "replace")))
        for label in ("pool", "region"):
            if label in where:
                headers.append((f"x-penstock-{label}".encode(), where[label].encode("latin-1", "replace")))

    def affinity(self, key: str | None) -> str:
        """What keeps requests together on one replica: the key that the request gives, or its session."""
        return key or (self.exchange.header(b"x-session-id") or b"").decode("latin-1")
