"""The ASGI application: every request becomes an `Exchange`, every failure one OpenAI-shaped error.

FastAPI holds the routes and writes `/openapi.json`, of which `/docs` is made; the paths that carry the load are looked
up in a dictionary first and never enter it. There is no middleware: ids, errors, metrics and the request log are all in
`App`, so that there is one place where an answer can come from.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

import penstock
from penstock.gateway.api.endpoints import ENDPOINTS
from penstock.gateway.app.cors import Cors
from penstock.gateway.app.docs_page import page
from penstock.gateway.app.endpoint import Door, Endpoint
from penstock.gateway.app.exchange import ClientGone, Exchange, Receive, Send, StalledReader
from penstock.gateway.app.openapi import openapi_of
from penstock.gateway.http.request import Message, Scope
from penstock.gateway.process.service import Service
from penstock.protocol.errors import ApiError, InvalidRequest, MethodNotAllowed, NotFound, ServerError
from penstock.telemetry.context import current
from penstock.telemetry.logging import log_request

log = logging.getLogger("penstock.gateway")

CLIENT_CLOSED = 499
"""What logs and metrics call a request whose client left; nothing is sent."""
METHODS = frozenset(("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"))
_EXCHANGE = "penstock.exchange"


class App:
    """The gateway as an ASGI callable. `door`: what of it is behind this port."""

    def __init__(self, service: Service, door: Door = "all") -> None:
        self.service = service
        self._endpoints = [endpoint for endpoint in ENDPOINTS if endpoint.behind(door)]
        self.fastapi = self._routes()
        self._hot = {(endpoint.method, endpoint.path): endpoint for endpoint in self._endpoints if endpoint.hot}
        self._inner = {endpoint.path: endpoint for endpoint in self._endpoints if endpoint.method == "POST"}
        origins = service.settings.cors_origins
        self._cors = Cors(origins) if origins else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"this application speaks HTTP only, not {scope['type']}")
        exchange = self._exchange(scope, receive, send)
        if self._cors is not None and await self._cors.answered(exchange):
            return
        endpoint = self._hot.get((exchange.method, exchange.path))
        if endpoint is not None:
            await self._answer(exchange, endpoint)
            return
        scope[_EXCHANGE] = exchange
        try:
            await self.fastapi(scope, receive, _tagging(exchange, send))
        finally:
            del scope[_EXCHANGE]  # which refers to the scope

    async def failed(self, error: Exception, scope: Scope, receive: Receive, send: Send | None) -> None:
        """What escaped, here or in front: our fault, told to the log, to metrics and, where nothing of an answer has
        been sent, to the client."""
        exchange = self._exchange(scope, receive, send or _nobody)
        context = current.get()
        if context is not None:  # it had got as far as having an id
            exchange.request_id = context.request_id
        endpoint = self._hot.get((exchange.method, exchange.path))
        exchange.route = "unknown" if endpoint is None else endpoint.path
        exchange.dialect = exchange.dialect if endpoint is None else endpoint.dialect
        about = {"request_id": exchange.request_id, "route": exchange.route}
        log.error("unhandled error outside of a handler", exc_info=error, extra=about)
        self.service.metrics.failed(exchange.route, ServerError.status, "escaped")
        if send is not None:
            await exchange.reply_error(_our_fault(exchange))

    def _exchange(self, scope: Scope, receive: Receive, send: Send) -> Exchange:
        settings = self.service.settings
        return Exchange(scope, receive, send, stalled_reader_s=settings.stalled_reader_s, receive_s=settings.receive_s)

    @property
    def paths(self) -> Collection[str]:
        """Where something can be posted."""
        return self._inner.keys()

    async def answer_inner(self, exchange: Exchange) -> None:
        """Answer a request that was not sent through a socket."""
        await self._answer(exchange, self._inner[exchange.path])

    async def _answer(self, exchange: Exchange, endpoint: Endpoint) -> None:
        service = self.service
        exchange.route = exchange.record.route = endpoint.path
        exchange.dialect = endpoint.dialect
        service.tracing.begin(exchange)
        in_flight = service.metrics.in_flight(endpoint.path)
        in_flight.inc()
        try:
            if endpoint.serves_tokens:
                service.drain.enter()
                try:
                    await self._guarded(exchange, self._handle(exchange, endpoint))
                finally:
                    service.drain.leave()
            else:
                await self._guarded(exchange, self._handle(exchange, endpoint))
        except ApiError as error:  # draining
            await self._guarded(exchange, _fail(error))
        finally:
            in_flight.dec()
            self._finish(exchange, endpoint.logged, timed=endpoint.serves_tokens)

    async def _handle(self, exchange: Exchange, endpoint: Endpoint) -> None:
        if exchange.line is not None:
            exchange.record.tenant, exchange.record.user_id = exchange.caller.tenant, exchange.caller.user or None
        elif endpoint.scope is not None:
            caller = exchange.caller = await self.service.authentication.caller(exchange, endpoint.scope)
            exchange.record.tenant, exchange.record.user_id = caller.tenant, caller.user or None
            exchange.timeline.follow("authenticate")
        await endpoint.handler(self.service, exchange)

    async def _guarded(self, exchange: Exchange, work: Awaitable[None]) -> None:
        """Run `work`; render what it raises. Nothing but cancellation comes out."""
        try:
            try:
                await work
            except ApiError as error:
                if error.reason is not None:
                    self.service.metrics.rejected(error.reason)
                self.service.metrics.failed(exchange.route, error.status, error.code or error.type)
                exchange.record.finish_reason = "error"
                await exchange.reply_error(error)
            except ClientGone:
                raise
            except Exception:
                log.exception("unhandled error", extra={"request_id": exchange.request_id, "route": exchange.route})
                exchange.record.finish_reason = "error"
                self.service.metrics.failed(exchange.route, ServerError.status, "unhandled")
                if not exchange.response_started:
                    await exchange.reply_error(_our_fault(exchange))
        except asyncio.CancelledError:
            exchange.record.finish_reason = "abort"
            raise
        except ClientGone as gone:
            gone.__traceback__ = None  # the generation has it, and is in there
            exchange.record.finish_reason = "abort"
            exchange.status = CLIENT_CLOSED
            self.service.metrics.disconnects.inc()
            if isinstance(gone, StalledReader):
                self.service.metrics.stalled_readers.inc()

    def _finish(self, exchange: Exchange, logged: bool, *, timed: bool = False) -> None:
        seconds = exchange.elapsed_s
        status = exchange.status or CLIENT_CLOSED
        method = exchange.method if exchange.method in METHODS else "other"  # a label must not grow with its users
        self.service.metrics.answered(exchange.route, method, status, seconds)
        if logged:
            exchange.record.status = status
            exchange.record.total_latency_ms = round(seconds * 1000, 3)
            log_request(exchange.record, self.service.tracing.texts(exchange))
            if self.service.request_log is not None:
                self.service.request_log.add(exchange.record)
            if timed:
                self.service.tracing.finish(exchange)

    def _routes(self) -> FastAPI:
        api = FastAPI(
            title="Penstock",
            version=penstock.__version__,
            description="OpenAI-compatible serving of language models.",
            docs_url=None,
            redoc_url=None,
        )

        def endpoint_function(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
            async def respond(request: Request) -> Response:
                return _Answer(lambda exchange: self._answer(exchange, endpoint))

            return respond

        for endpoint in self._endpoints:
            api.add_api_route(
                endpoint.path,
                endpoint_function(endpoint),
                methods=[endpoint.method],
                summary=endpoint.summary,
                tags=[endpoint.tag],
                operation_id=endpoint.handler.__name__,
                include_in_schema=endpoint.documented,
                response_class=Response,
            )

        async def http_error(request: Request, error: Exception) -> Response:
            assert isinstance(error, HTTPException)
            return _Answer(lambda exchange: self._answer_unrouted(exchange, error))

        async def crashed(request: Request, error: Exception) -> Response:
            return _Answer(lambda exchange: exchange.reply_error(_our_fault(exchange)))  # the error itself goes on

        api.add_exception_handler(HTTPException, http_error)
        api.add_exception_handler(Exception, crashed)
        api.openapi = openapi_of(api, self._endpoints)  # type: ignore[method-assign]

        async def reference() -> HTMLResponse:
            return HTMLResponse(page(api.openapi()))

        api.add_api_route("/docs", reference, include_in_schema=False)
        return api

    async def _answer_unrouted(self, exchange: Exchange, error: HTTPException) -> None:
        exchange.route = "unknown"
        where = f"{exchange.method[:16]} {exchange.path[:256]}"
        problem: ApiError
        if error.status_code == 404:
            problem = NotFound(f"There is no {where} here. The endpoints are listed at /docs.")
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "")
            exchange.extra_headers.append((b"allow", allowed.encode()))
            problem = MethodNotAllowed(f"{where} is not possible; use {allowed}.")
        else:
            problem = InvalidRequest(str(error.detail))
        await self._guarded(exchange, _fail(problem))
        self._finish(exchange, logged=False)


async def _fail(error: ApiError) -> None:
    raise error


async def _nobody(message: Message) -> None:
    raise RuntimeError("there is nobody to answer any more")


def _our_fault(exchange: Exchange) -> ServerError:
    return ServerError(f"The server failed on this request. Quote its id: {exchange.request_id}.")


class _Answer(Response):
    """Lets a FastAPI route answer through the request's `Exchange`."""

    def __init__(self, answer: Callable[[Exchange], Awaitable[None]]) -> None:
        super().__init__()
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope[_EXCHANGE])


def _tagging(exchange: Exchange, send: Send) -> Send:
    """For the pages FastAPI writes itself (`/docs`): the same request id header."""

    async def tagged(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = (b"x-request-id", exchange.request_id.encode())
            message["headers"] = [*message["headers"], own, *exchange.extra_headers]
        await send(message)

    return tagged
