"""The table of endpoints: how requests find their endpoint, and how handlers find the object that answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from penstock.gateway.api.endpoints import ENDPOINTS
from penstock.gateway.api.reply_schemas import REPLIES
from penstock.gateway.app.endpoint import Endpoint, Unavailable, bind
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.app.openapi import openapi
from penstock.gateway.app.router import Router, pattern
from penstock.protocol.errors import ServiceUnavailable


class Files:
    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[object] = []

    async def one(self, exchange: Exchange) -> None:
        self.asked.append(exchange)

    async def content(self, exchange: Exchange) -> None:
        self.asked.append(exchange)


class NoFiles(Files):
    async def one(self, exchange: Exchange) -> None:
        raise LookupError(self.name)


TABLE = (
    Endpoint("GET", "/files", Files.one, "", ""),
    Endpoint("POST", "/files", Files.one, "", ""),
    Endpoint("GET", "/files/{file}", Files.one, "", ""),
    Endpoint("GET", "/files/{file}/content", Files.content, "", ""),
    Endpoint("DELETE", "/models/{model:path}", Files.one, "", ""),
    Endpoint("POST", "/models/{model:path}/sleep", Files.content, "", ""),
)
EXCHANGE = cast(Exchange, object())


@pytest.mark.parametrize(
    ("method", "path", "found"),
    [
        ("GET", "/files/a.b", ("/files/{file}", {"file": "a.b"})),
        ("GET", "/files/a/content", ("/files/{file}/content", {"file": "a"})),
        ("GET", "/files/", None),
        ("GET", "/files/a/b", None),
        ("DELETE", "/models/org/name", ("/models/{model:path}", {"model": "org/name"})),
        ("POST", "/models/org/name/sleep", ("/models/{model:path}/sleep", {"model": "org/name"})),
        ("PUT", "/files/a", None),
    ],
)
def test_paths_with_parameters(method: str, path: str, found: tuple[str, dict[str, str]] | None) -> None:
    router = Router(bind(TABLE, [Files("all")]))
    match = router.match(method, path)
    assert (None if match is None else (match[0].endpoint.path, match[1])) == found


def test_fixed_paths_are_looked_up_and_other_methods_are_known() -> None:
    router = Router(bind(TABLE, [Files("all")]))
    assert router.fixed["POST", "/files"].endpoint is TABLE[1]
    assert router.methods_of("/files") == ["GET", "HEAD", "POST"]
    assert router.methods_of("/files/a") == ["GET", "HEAD"]
    assert router.methods_of("/models/a/sleep") == ["DELETE", "POST"] and not router.methods_of("/nothing")


def test_a_pattern_takes_every_other_character_literally() -> None:
    assert pattern("/v1.x/{id}").fullmatch("/v1.x/1") and not pattern("/v1.x/{id}").fullmatch("/v1ax/1")


async def test_a_handler_is_bound_to_the_object_whose_class_defines_it() -> None:
    files = Files("all")
    for bound in bind(TABLE, [files]):
        await bound.handle(EXCHANGE)
    assert len(files.asked) == len(TABLE)


async def test_a_subclass_may_answer_otherwise() -> None:
    first, *_ = bind(TABLE, [NoFiles("off")])
    with pytest.raises(LookupError, match="off"):
        await first.handle(EXCHANGE)


async def test_a_feature_that_is_not_configured_refuses_every_request() -> None:
    for bound in bind(TABLE, [Unavailable(Files, ServiceUnavailable, "There is no store.")]):
        with pytest.raises(ServiceUnavailable, match="There is no store"):
            await bound.handle(EXCHANGE)


def test_an_endpoint_that_nothing_answers_is_an_error() -> None:
    with pytest.raises(LookupError, match="GET /files"):
        bind(TABLE, [])


def test_the_names_of_handlers_are_unique() -> None:
    """The shapes of replies are found by them; a handler that answers several paths has an operation id for each."""
    handlers: dict[str, Callable[..., Any]] = {}
    for endpoint in ENDPOINTS:
        assert handlers.setdefault(endpoint.name, endpoint.handler) is endpoint.handler
    paths = openapi(ENDPOINTS, REPLIES)["paths"]
    ids = [operation["operationId"] for methods in paths.values() for operation in methods.values()]
    assert len(ids) == len(set(ids))
