"""R-GW-9: the table of endpoints is walked with two tenants, and with a key that may use less than its tenant.

For each endpoint there is a case here; a new endpoint without one fails the test. A case names something that does not
exist for the caller, and the reply must be that for a name that nobody has, byte for byte; or it reads, and no hidden
name may appear.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from penstock.gateway.api.endpoints import ENDPOINTS
from penstock.text import TextModel
from tests.gateway.access.world import HELLO, World, world
from tests.gateway.conftest import Serving, until
from tests.tools.execution.parts import weather

MODELS = ("hidden-model", "hidden-alias", "hidden-adapter", "hidden-remote", "hidden-remote-alias", "hidden-route")
LOCAL = MODELS[:3]
ENCODERS = ("hidden-encoder",)
OUTSIDERS = ("rival", "narrow")


@dataclass(frozen=True)
class Named:
    """Names something. `send`: the request for a name; `names`: the hidden ones; `works`: for whom they exist."""

    send: Callable[[str], dict[str, Any]]
    names: tuple[str, ...] = MODELS
    status: int = 404
    works: str = "acme"


@dataclass(frozen=True)
class Read:
    """Names nothing. `shows`: what acme sees there, and the others must not."""

    shows: tuple[str, ...] = ()
    query: str = ""


@dataclass(frozen=True)
class Kept:
    """Something that acme has stored with a hidden model; `of`: its id. `made`: where nothing else may be seen."""

    of: str
    request: dict[str, Any] | None = None
    status: int = 404


FREE = object()
"""Stores what it is sent, and names no model."""
OPERATORS = object()
"""Needs a key of an operator."""


def body(**fields: Any) -> Callable[[str], dict[str, Any]]:
    return lambda name: {"json": {"model": name, **fields}}


CHAT = Named(body(messages=HELLO))
MESSAGES = Named(body(messages=HELLO, max_tokens=5))
TOKENS = Named(body(prompt="hi"), LOCAL)
DETOKENS = Named(body(tokens=[65, 66]), LOCAL)
RANK = Named(body(query="a", documents=["b"]), ENCODERS)
SCORE = Named(body(text_1="a", text_2="b"), ENCODERS)
EMBED = Named(body(input="hi"), ENCODERS)
BATCH_BODY = {"requests": [{"custom_id": "1", "params": {"model": "tiny", "max_tokens": 1, "messages": HELLO}}]}


def in_path(before: str, after: str = "", **request: Any) -> Callable[[str], dict[str, Any]]:
    return lambda name: {"path": f"{before}{name}{after}", **request}


def of_model(path: str) -> Named:
    """Described under its name in the query."""
    return Named(in_path(f"{path}?model="), LOCAL)


COLLECTION = "/v1/collections/"


def collection(after: str = "", **request: Any) -> Named:
    return Named(in_path(COLLECTION, after, **request), ("hidden-notes",))


def store(after: str = "", works: str = "acme", **request: Any) -> Named:
    """The same collection as a vector store."""
    return Named(in_path("/v1/vector_stores/", after, **request), ("hidden-notes",), works=works)


CASES: dict[tuple[str, str], object] = {
    ("POST", "/v1/chat/completions"): CHAT,
    ("GET", "/v1/chat/completions"): Read(("hidden-model",)),
    ("GET", "/v1/chat/completions/{completion}"): Kept("completion"),
    ("POST", "/v1/chat/completions/{completion}"): Kept("completion", {"json": {"metadata": {"a": "b"}}}),
    ("DELETE", "/v1/chat/completions/{completion}"): Kept("completion"),
    ("GET", "/v1/chat/completions/{completion}/messages"): Kept("completion"),
    ("POST", "/v1/completions"): Named(body(prompt="hi"), (*LOCAL, "hidden-remote", "hidden-route")),
    ("POST", "/v1/responses"): Named(body(input="hi")),
    ("POST", "/v1/responses/input_tokens"): Named(body(input="hi"), LOCAL),
    ("POST", "/v1/responses/compact"): Named(body(input="hi")),
    ("GET", "/v1/responses/{response}"): Kept("response"),
    ("DELETE", "/v1/responses/{response}"): Kept("response"),
    ("GET", "/v1/responses/{response}/input_items"): Kept("response"),
    ("POST", "/v1/responses/{response}/cancel"): Kept("response"),
    ("GET", "/v1/tools"): Read(("hidden-tool",)),
    ("GET", "/v1/conversations"): Read(),
    ("GET", "/v1/conversations/{conversation}"): FREE,
    ("POST", "/v1/conversations"): FREE,
    ("POST", "/v1/conversations/{conversation}"): FREE,
    ("POST", "/v1/conversations/{conversation}/items"): FREE,
    ("GET", "/v1/conversations/{conversation}/items"): FREE,
    ("GET", "/v1/conversations/{conversation}/items/{item}"): FREE,
    ("DELETE", "/v1/conversations/{conversation}/items/{item}"): FREE,
    ("DELETE", "/v1/conversations/{conversation}"): FREE,
    ("POST", "/v1/messages"): MESSAGES,
    ("POST", "/v1/messages/count_tokens"): Named(body(messages=HELLO), LOCAL),
    ("POST", "/v1/messages/batches"): FREE,  # each line is a request of its own when it runs
    ("GET", "/v1/messages/batches"): Read(),
    ("GET", "/v1/messages/batches/{batch}"): FREE,
    ("DELETE", "/v1/messages/batches/{batch}"): FREE,
    ("POST", "/v1/messages/batches/{batch}/cancel"): FREE,
    ("GET", "/v1/messages/batches/{batch}/results"): FREE,
    ("POST", "/v1/embeddings"): EMBED,
    ("POST", "/v1/rerank"): RANK,
    ("POST", "/rerank"): RANK,
    ("POST", "/v2/rerank"): RANK,
    ("POST", "/v1/score"): SCORE,
    ("POST", "/score"): SCORE,
    ("POST", "/pooling"): EMBED,
    ("POST", "/v1/moderations"): Named(body(input="hi"), ("hidden-rule",)),
    ("POST", "/v1/files"): FREE,
    ("GET", "/v1/files"): Read(),
    ("GET", "/v1/files/{file}"): FREE,
    ("DELETE", "/v1/files/{file}"): FREE,
    ("GET", "/v1/files/{file}/content"): FREE,
    ("POST", "/v1/uploads"): FREE,
    ("POST", "/v1/uploads/{upload}/parts"): FREE,
    ("POST", "/v1/uploads/{upload}/complete"): FREE,
    ("POST", "/v1/uploads/{upload}/cancel"): FREE,
    ("POST", "/v1/batches"): FREE,
    ("GET", "/v1/batches"): Read(),
    ("GET", "/v1/batches/{batch}"): FREE,
    ("POST", "/v1/batches/{batch}/cancel"): FREE,
    ("POST", "/v1/webhook_endpoints"): FREE,
    ("GET", "/v1/webhook_endpoints"): Read(),
    ("GET", "/v1/webhook_endpoints/{webhook_endpoint}"): FREE,
    ("POST", "/v1/webhook_endpoints/{webhook_endpoint}"): FREE,
    ("DELETE", "/v1/webhook_endpoints/{webhook_endpoint}"): FREE,
    ("POST", "/v1/webhook_endpoints/{webhook_endpoint}/rotate_secret"): FREE,
    ("POST", "/v1/webhook_endpoints/{webhook_endpoint}/test"): FREE,
    ("GET", "/v1/webhook_event_types"): Read(),
    ("GET", "/v1/cache"): Read(),
    ("DELETE", "/v1/cache"): Named(lambda name: {"path": f"/v1/cache?model={name}"}, ("hidden-model",), 200, works=""),
    ("GET", "/v1/models"): Read((*MODELS, *ENCODERS)),
    ("GET", "/v1/models/{model:path}"): Named(in_path("/v1/models/"), (*MODELS, *ENCODERS)),
    ("POST", "/v1/tokenize"): TOKENS,
    ("POST", "/tokenize"): TOKENS,
    ("POST", "/v1/detokenize"): DETOKENS,
    ("POST", "/detokenize"): DETOKENS,
    ("POST", "/v1/watermark/detect"): Named(body(text="Is it marked?"), LOCAL),
    ("GET", "/tokenizer_info"): Named(in_path("/tokenizer_info?model="), LOCAL),
    ("POST", "/v1/collections"): FREE,  # see test_paths.py
    ("GET", "/v1/collections"): Read(("hidden-notes",)),
    ("GET", "/v1/collections/{collection}"): collection(),
    ("DELETE", "/v1/collections/{collection}"): Named(in_path(COLLECTION), ("hidden-notes",), works=""),
    ("POST", "/v1/collections/{collection}/search"): collection("/search", json={"query": "leave"}),
    ("POST", "/v1/collections/{collection}/documents"): collection("/documents", json={"name": "a", "text": "b"}),
    ("GET", "/v1/collections/{collection}/documents"): collection("/documents"),
    ("GET", "/v1/collections/{collection}/documents/{document}"): collection("/documents/one"),
    ("PUT", "/v1/collections/{collection}/documents/{document}"): collection(
        "/documents/two", json={"name": "a", "text": "b"}
    ),
    ("DELETE", "/v1/collections/{collection}/documents/{document}"): collection("/documents/two"),
    ("GET", "/v1/collections/{collection}/documents/{document}/chunks"): collection("/documents/one/chunks"),
    ("GET", "/v1/collections/{collection}/chunks/{chunk}"): Named(
        in_path(COLLECTION, "/chunks/nothing"), ("hidden-notes",), works=""
    ),
    ("POST", "/v1/vector_stores"): FREE,  # see test_paths.py
    ("GET", "/v1/vector_stores"): Read(("hidden-notes",)),
    ("GET", "/v1/vector_stores/{vector_store}"): store(),
    ("POST", "/v1/vector_stores/{vector_store}"): store(json={"metadata": {"a": "b"}}),
    ("DELETE", "/v1/vector_stores/{vector_store}"): store(works=""),
    ("POST", "/v1/vector_stores/{vector_store}/search"): store("/search", json={"query": "leave"}),
    ("POST", "/v1/vector_stores/{vector_store}/files"): store("/files", works="", json={"file_id": "file-1"}),
    ("GET", "/v1/vector_stores/{vector_store}/files"): store("/files"),
    ("GET", "/v1/vector_stores/{vector_store}/files/{file}"): store("/files/one"),
    ("POST", "/v1/vector_stores/{vector_store}/files/{file}"): store("/files/one", json={"attributes": {"a": 1}}),
    ("DELETE", "/v1/vector_stores/{vector_store}/files/{file}"): store("/files/one", works=""),
    ("GET", "/v1/vector_stores/{vector_store}/files/{file}/content"): store("/files/one/content"),
    ("POST", "/v1/vector_stores/{vector_store}/file_batches"): store(
        "/file_batches", works="", json={"file_ids": ["file-1"]}
    ),
    ("GET", "/v1/vector_stores/{vector_store}/file_batches/{batch}"): store("/file_batches/vsfb_1", works=""),
    ("POST", "/v1/vector_stores/{vector_store}/file_batches/{batch}/cancel"): store(
        "/file_batches/vsfb_1/cancel", works=""
    ),
    ("GET", "/v1/vector_stores/{vector_store}/file_batches/{batch}/files"): store(
        "/file_batches/vsfb_1/files", works=""
    ),
    ("GET", "/v1/traces"): Read(("hidden-model",), "limit=1000"),
    ("GET", "/v1/traces/{request}"): Kept("request"),
    ("POST", "/v1/feedback"): Named(lambda name: {"json": {"response_id": name, "rating": "up"}}, ("{answer}",)),
    ("GET", "/v1/usage"): Read(("hidden-model",)),
    ("GET", "/v1/account"): Read(),
    ("GET", "/v1/keys"): Read(),
    ("GET", "/v1/requests"): Read(("hidden-model",), "limit=10000"),
    ("POST", "/api/chat"): CHAT,
    ("POST", "/api/generate"): Named(body(prompt="hi")),
    ("POST", "/api/embed"): EMBED,
    ("POST", "/api/embeddings"): Named(body(prompt="hi"), ENCODERS),
    ("GET", "/api/tags"): Read(("hidden-model", "hidden-adapter", "hidden-remote", "hidden-route", *ENCODERS)),
    ("GET", "/api/ps"): Read(("hidden-model",)),
    ("POST", "/api/show"): Named(body(), (*MODELS, *ENCODERS)),
    ("GET", "/api/version"): Read(),
    ("POST", "/completion"): Named(body(prompt="hi"), (*LOCAL, "hidden-remote", "hidden-route")),
    ("POST", "/completions"): Named(body(prompt="hi"), (*LOCAL, "hidden-remote", "hidden-route")),
    ("POST", "/infill"): Named(body(input_prefix="a", input_suffix="b"), LOCAL),
    ("POST", "/embedding"): Named(body(content="hi"), ENCODERS),
    ("POST", "/embeddings"): Named(body(content="hi"), ENCODERS),
    ("POST", "/apply-template"): Named(body(messages=HELLO), LOCAL),
    ("GET", "/props"): of_model("/props"),
    ("GET", "/lora-adapters"): of_model("/lora-adapters"),
    ("GET", "/slots"): OPERATORS,
    ("POST", "/reranking"): RANK,
    ("POST", "/v1/reranking"): RANK,
    ("GET", "/v1/health"): Read(),
    ("POST", "/"): Named(body(inputs="hi"), (*LOCAL, "hidden-remote", "hidden-route")),
    ("POST", "/generate_stream"): Named(body(inputs="hi"), (*LOCAL, "hidden-remote", "hidden-route")),
    ("GET", "/info"): of_model("/info"),
    ("POST", "/generate"): Named(body(text="hi"), (*LOCAL, "hidden-remote", "hidden-route")),
    ("GET", "/model_info"): of_model("/model_info"),
    ("GET", "/get_model_info"): of_model("/get_model_info"),
    ("GET", "/health_generate"): Read(("hidden-model",)),
    ("GET", "/"): Read(),
    ("GET", "/health"): Read(),
    ("GET", "/ping"): Read(),
    ("GET", "/version"): Read(),
    ("GET", "/health/live"): Read(("hidden-model",)),
    ("GET", "/health/ready"): Read(("hidden-model",)),
    ("GET", "/metrics"): OPERATORS,
}


def test_every_endpoint_has_a_case() -> None:
    tenants = {(one.method, one.path) for one in ENDPOINTS if one.scope != "admin"}
    assert tenants == CASES.keys(), "a new endpoint needs a case: who may see what it names or shows?"


def plain(reply: httpx.Response, name: str) -> tuple[int, str, dict[str, str]]:
    """A reply without what differs between any two."""
    headers = {key: value for key, value in reply.headers.items() if key not in ("openai-processing-ms", "date")}
    said = reply.text.replace(name, "NAME")
    return reply.status_code, said, {key: value.replace(name, "NAME") for key, value in headers.items()}


def missing(name: str) -> str:
    """A name of the same length that nobody has."""
    if name.startswith("hidden-"):
        return "absent-" + name.removeprefix("hidden-")
    return name[:-12] + "0" * 12


async def stored(it: World) -> dict[str, str]:
    """What acme has made with what is hidden from others; by what it is."""
    made: dict[str, str] = {}
    made["completion"] = (await it.chat("acme", "hidden-model", store=True)).json()["id"]
    made["response"] = (await it.ok("acme", "POST", "/v1/responses", json={"model": "hidden-adapter", "input": "hi"}))[
        "id"
    ]
    answer = await it.ask(
        "acme", "POST", "/v1/chat/completions", json={"model": "hidden-model", "messages": HELLO},
        headers={"x-request-id": "hers-" + "1" * 12},
    )  # fmt: skip
    made["request"] = "hers-" + "1" * 12
    made["answer"] = answer.json()["id"]
    await it.ok("acme", "POST", "/v1/collections", json={"name": "hidden-notes"})
    text = {"name": "one", "text": "Parents receive twelve weeks of paid leave."}
    await it.ok("acme", "PUT", f"{COLLECTION}hidden-notes/documents/one", json=text)
    await until(
        lambda: it.ok("acme", "GET", f"{COLLECTION}hidden-notes"), lambda shown: shown["documents"]["ready"] == 1
    )
    return made


async def test_what_is_not_allowed_does_not_exist(
    serving: Serving, text: TextModel, tmp_path: Path, encoder_endpoint: str
) -> None:
    with weather() as api:
        async with world(serving, text, tmp_path, encoder_endpoint, api) as it:
            made = await stored(it)
            before = len(it.asked)
            for (method, path), case in CASES.items():
                for who in OUTSIDERS:
                    await outside(it, who, method, path, case, made)
            assert len(it.asked) == before, "the hidden model was asked for a caller that may not use it"
            for (method, path), case in CASES.items():
                await inside(it, method, path, case, made)
            assert len(it.asked) > before


async def outside(it: World, who: str, method: str, path: str, case: object, made: dict[str, str]) -> None:
    """Nothing hidden shows to a caller that may not use it."""
    about = (who, method, path)
    if isinstance(case, Named):
        for name in case.names:
            name = name.format(**made)
            refused, unknown = [await send(it, who, method, path, case, each) for each in (name, missing(name))]
            assert plain(refused, name) == plain(unknown, missing(name)), (*about, name)
            assert refused.status_code == case.status, (*about, name, refused.text)
            assert "hidden-" not in refused.text.replace(name, ""), (*about, refused.text)
    elif isinstance(case, Kept):
        id = made[case.of]
        refused, unknown = [await fetch(it, who, method, path, case, each) for each in (id, missing(id))]
        assert plain(refused, id) == plain(unknown, missing(id)), about
        assert refused.status_code == case.status, (*about, refused.text)
    elif isinstance(case, Read):
        reply = await it.ask(who, method, f"{path}?{case.query}")
        assert reply.status_code == 200, (*about, reply.text)
        assert "hidden-" not in reply.text, (*about, reply.text)
    elif case is OPERATORS:
        assert (await it.ask(who, method, path)).status_code == 403


async def inside(it: World, method: str, path: str, case: object, made: dict[str, str]) -> None:
    """The same exists for acme, so that the test above is not passed by a server where nothing works."""
    if isinstance(case, Named) and case.works:
        for name in case.names:
            name = name.format(**made)
            reply = await send(it, case.works, method, path, case, name)
            assert reply.status_code in (200, 400), (method, path, name, reply.text)
    elif isinstance(case, Kept) and method == "GET":
        reply = await fetch(it, "acme", method, path, case, made[case.of])
        assert reply.status_code == 200, (method, path, reply.text)
    elif isinstance(case, Read):
        shown = (await it.ask("acme", method, f"{path}?{case.query}")).text
        assert all(name in shown for name in case.shows), (path, case.shows, shown)


async def send(it: World, who: str, method: str, path: str, case: Named, name: str) -> httpx.Response:
    request = case.send(name)
    return await it.ask(who, method, request.pop("path", path), **request)


async def fetch(it: World, who: str, method: str, path: str, case: Kept, id: str) -> httpx.Response:
    return await it.ask(who, method, path.replace("{" + case.of + "}", id), **(case.request or {}))
