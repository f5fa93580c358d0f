"""The ASGI application: every request becomes an `Exchange`, every failure one error in the words of its API.

There is no middleware: ids, errors, metrics and the request log are all in `App`, so that there is one place where an
answer can come from.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from urllib.parse import quote

from penstock.gateway.app.authentication import OpenAuthentication
from penstock.gateway.app.bodies import Bodies
from penstock.gateway.app.cors import Cors
from penstock.gateway.app.data_rules import request_demand
from penstock.gateway.app.decisions import audit_entries
from penstock.gateway.app.dialects import dialect_of
from penstock.gateway.app.drain import Drain
from penstock.gateway.app.endpoint import BoundEndpoint
from penstock.gateway.app.exchange import ClientDisconnected, Exchange, Receive, Send, StalledReader
from penstock.gateway.app.router import Router
from penstock.gateway.app.tracing import RequestTracing
from penstock.gateway.http.request import Message, Scope
from penstock.identity.data_rules import NO_RULES, DataRules
from penstock.metering.audit import AuditEntry
from penstock.protocol.errors import ApiError, InvalidRequest, MethodNotAllowed, NotFound, ServerError
from penstock.telemetry.context import current
from penstock.telemetry.logging import RequestRecord, log_request
from penstock.telemetry.metrics import Metrics

log = logging.getLogger("penstock.gateway")

CLIENT_CLOSED = 499
"""The status of a request whose client disconnected, in logs and metrics; nothing is sent."""
METHODS = frozenset(("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"))


class App:
    """The gateway as an ASGI callable, for one port."""

    def __init__(
        self,
        endpoints: Sequence[BoundEndpoint],
        *,
        authentication: OpenAuthentication,
        drain: Drain,
        metrics: Metrics,
        tracing: RequestTracing,
        record: Callable[[RequestRecord], None],
        cors_origins: Sequence[str] = (),
        stalled_reader_s: float,
        receive_s: float,
        bodies: Bodies,
        refuses_unknown: bool = False,
        data_rules: DataRules = NO_RULES,
        audit: Callable[[AuditEntry], None] | None = None,
    ) -> None:
        """`record` takes the record of every logged request to the request log; `audit` takes decisions of data rules
        to the audit log."""
        self._router = Router(endpoints)
        self._fixed = self._router.fixed
        self._posted = {bound.endpoint.path: bound for bound in endpoints if bound.endpoint.method == "POST"}
        self._authentication = authentication
        self._drain = drain
        self._metrics = metrics
        self._tracing = tracing
        self._record = record
        self._cors = Cors(cors_origins) if cors_origins else None
        self._stalled_reader_s = stalled_reader_s
        self._receive_s = receive_s
        self._bodies = bodies
        self._refuses_unknown = refuses_unknown
        self._data_rules = data_rules
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"this application speaks HTTP only, not {scope['type']}")
        exchange = self._exchange(scope, receive, send)
        if self._cors is not None and await self._cors.answered(exchange):
            return
        bound = self._fixed.get((exchange.method, exchange.path))
        if bound is None:
            found = self._router.match(exchange.method, exchange.path)
            if found is None:
                await self._answer_unrouted(exchange)
                return
            bound, scope["path_params"] = found
        await self._answer(exchange, bound)

    async def failed(self, error: Exception, scope: Scope, receive: Receive, send: Send | None) -> None:
        """An exception that no handler caught, here or in front of this application: log and count it, and answer 500
        unless a response has begun (`send` is None then)."""
        exchange = self._exchange(scope, receive, send or _refuse_to_send)
        context = current.get()
        if context is not None:  # it had got as far as having an id
            exchange.request_id = context.request_id
        bound = self._fixed.get((exchange.method, exchange.path))
        if bound is None:
            exchange.route = "unknown"
        else:
            exchange.route, exchange.dialect = bound.endpoint.path, bound.endpoint.dialect
        about = {"request_id": exchange.request_id, "route": exchange.route}
        log.error("unhandled error outside of a handler", exc_info=error, extra=about)
        self._metrics.failed(exchange.route, ServerError.status, "escaped")
        if send is not None:
            await exchange.reply_error(_our_fault(exchange))

    def _exchange(self, scope: Scope, receive: Receive, send: Send) -> Exchange:
        return Exchange(
            scope,
            receive,
            send,
            stalled_reader_s=self._stalled_reader_s,
            receive_s=self._receive_s,
            bodies=self._bodies,
            refuses_unknown=self._refuses_unknown,
        )

    @property
    def paths(self) -> Collection[str]:
        """The paths that take a POST request."""
        return self._posted.keys()

    async def answer_in_memory(self, exchange: Exchange) -> None:
        """Answer a request that did not come from a socket; its caller is known."""
        exchange.refuses_unknown = self._refuses_unknown
        await self._answer(exchange, self._posted[exchange.path], authenticated=True)

    async def _answer(self, exchange: Exchange, bound: BoundEndpoint, *, authenticated: bool = False) -> None:
        endpoint = bound.endpoint
        exchange.route = exchange.record.route = endpoint.path
        exchange.dialect = endpoint.dialect
        self._tracing.begin(exchange)
        in_flight = self._metrics.in_flight(endpoint.path)
        in_flight.inc()
        try:
            if endpoint.serves_tokens:
                self._drain.enter()
                try:
                    await self._guarded(exchange, self._handle(exchange, bound, authenticated))
                finally:
                    self._drain.leave()
            else:
                await self._guarded(exchange, self._handle(exchange, bound, authenticated))
        except ApiError as error:  # draining
            await self._guarded(exchange, _fail(error))
        finally:
            in_flight.dec()
            self._finish(exchange, endpoint.logged, timed=endpoint.serves_tokens)

    async def _handle(self, exchange: Exchange, bound: BoundEndpoint, authenticated: bool) -> None:
        if authenticated:
            exchange.record.tenant, exchange.record.user_id = exchange.caller.tenant, exchange.caller.user or None
        elif bound.endpoint.scope is not None:
            caller = exchange.caller = await self._authentication.caller(exchange, bound.endpoint)
            exchange.record.tenant, exchange.record.user_id = caller.tenant, caller.user or None
            exchange.timeline.follow("authenticate")
        exchange.demand = exchange.demand.narrowed(request_demand(exchange, self._data_rules))
        await bound.handle(exchange)

    async def _guarded(self, exchange: Exchange, work: Awaitable[None]) -> None:
        """Run `work` and render what it raises; only a cancellation passes through."""
        try:
            try:
                await _bounded(exchange, work)
            except ApiError as error:
                if error.reason is not None:
                    self._metrics.rejected(error.reason)
                self._metrics.failed(exchange.route, error.status, error.code or error.type)
                exchange.record.finish_reason = "error"
                forget_frames(error)
                await exchange.reply_error(error)
            except ClientDisconnected:
                raise
            except Exception as error:
                log.exception("unhandled error", extra={"request_id": exchange.request_id, "route": exchange.route})
                forget_frames(error)
                exchange.record.finish_reason = "error"
                self._metrics.failed(exchange.route, ServerError.status, "unhandled")
                if not exchange.response_started:
                    await exchange.reply_error(_our_fault(exchange))
        except asyncio.CancelledError:
            exchange.record.finish_reason = "abort"
            raise
        except ClientDisconnected as gone:
            gone.__traceback__ = None  # it refers to the generation, which refers to it
            exchange.record.finish_reason = "abort"
            exchange.status = CLIENT_CLOSED
            self._metrics.disconnects.inc()
            if isinstance(gone, StalledReader):
                self._metrics.stalled_readers.inc()

    def _finish(self, exchange: Exchange, logged: bool, *, timed: bool = False) -> None:
        if exchange.handed_over:
            return
        seconds = exchange.elapsed_s
        status = exchange.status or CLIENT_CLOSED
        method = exchange.method if exchange.method in METHODS else "other"  # a label must not grow with its users
        self._metrics.answered(exchange.route, method, status, seconds)
        if exchange.decisions and self._audit is not None:
            for entry in audit_entries(exchange):
                self._audit(entry)
        if logged:
            exchange.record.status = status
            exchange.record.total_latency_ms = round(seconds * 1000, 3)
            log_request(exchange.record, self._tracing.texts(exchange))
            self._record(exchange.record)
            if timed:
                self._tracing.finish(exchange)

    async def _answer_unrouted(self, exchange: Exchange) -> None:
        exchange.route = "unknown"
        path = exchange.path
        exchange.dialect = dialect_of(path)
        methods = ", ".join(self._router.methods_of(path))
        where = f"{exchange.method[:16]} {path[:256]}"
        if methods:
            exchange.extra_headers.append((b"allow", methods.encode()))
            await self._guarded(exchange, _fail(MethodNotAllowed(f"{where} is not possible; use {methods}.")))
        elif (plain := _plain(path)) != path and self._router.methods_of(plain):
            await self._guarded(exchange, exchange.reply(307, b"", headers=[(b"location", _location(exchange, plain))]))
        else:
            await self._guarded(exchange, _fail(NotFound(f"There is no {where} here. {self._elsewhere(exchange)}")))
        self._finish(exchange, logged=False)

    def _elsewhere(self, exchange: Exchange) -> str:
        """Where to look for what is not here."""
        meant = self._router.meant(exchange.method, exchange.path)
        if meant is None:
            return "The endpoints are listed at /docs."
        return (
            f"Did you mean {meant}? Check the client's base URL: it ends with /v1 for clients of OpenAI, and without "
            "it for those of Anthropic and Ollama."
        )


async def _bounded(exchange: Exchange, work: Awaitable[None]) -> None:
    """Run `work`. JSON that can be decoded may be nested too deeply for what walks through it later."""
    try:
        await work
    except RecursionError as error:
        if exchange.response_started:
            raise
        about = {"request_id": exchange.request_id, "route": exchange.route}
        log.warning("a request is nested too deeply", extra={**about, "where": _innermost(error)})
        forget_frames(error)
        raise InvalidRequest("The request body is nested too deeply.", code="invalid_json") from None


def _innermost(error: BaseException) -> str:
    """Where an error was raised."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return "" if frame is None else f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}"


def forget_frames(error: BaseException) -> None:
    """Cut an error from the frames it came through. They refer to it in turn, and to all that the request sent: such
    a cycle would stay in memory until the next garbage collection, which is rare here."""
    pending: list[BaseException | None] = [error]
    while pending:
        if (each := pending.pop()) is not None and each.__traceback__ is not None:
            each.__traceback__ = None
            pending += (each.__cause__, each.__context__)


async def _fail(error: ApiError) -> None:
    raise error


async def _refuse_to_send(message: Message) -> None:
    raise RuntimeError("the response has begun already")


def _our_fault(exchange: Exchange) -> ServerError:
    return ServerError(f"The server failed on this request. Quote its id: {exchange.request_id}.")


def _plain(path: str) -> str:
    """A path with one slash where there are several, and none at its end."""
    return "/" + "/".join(part for part in path.split("/") if part)


def _location(exchange: Exchange, path: str) -> bytes:
    """Where a request belongs whose path had too many slashes. It names no host, since what a client sends as `Host`
    must not decide where others are sent; for the same reason `path` begins with one slash."""
    query: bytes = exchange.scope["query_string"]
    return quote(path, safe=":/@!$&'()*+,;=").encode() + (b"?" + query if query else b"")
