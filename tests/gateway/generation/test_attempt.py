"""Routing state of one attempt to answer a request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from penstock.gateway.accounting.answer_ids import AnswerIds
from penstock.gateway.accounting.batch_line import BATCH_LINE, BatchLine
from penstock.gateway.app.bodies import Bodies
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.attempt import Attempt
from penstock.routing.registry import AnsweringModel

MODEL = cast(AnsweringModel, SimpleNamespace(name="tiny-de", base_name="tiny", adapter="de", fingerprint="f"))


def exchange_of(line: BatchLine | None = None, headers: tuple[tuple[bytes, bytes], ...] = ()) -> Exchange:
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "http_version": "1.1", "headers": headers}
    if line is not None:
        scope[BATCH_LINE] = line
    nothing = cast(Any, None)
    return Exchange(scope, nothing, nothing, stalled_reader_s=1.0, receive_s=1.0, bodies=Bodies())


def attempt_of(exchange: Exchange, **options: Any) -> Attempt:
    return Attempt(exchange, "tiny", AnswerIds(exchange), **options)


def test_what_an_attempt_holds_is_released_once() -> None:
    released: list[str] = []
    attempt = attempt_of(exchange_of())
    attempt.hold(lambda: released.append("slice"))
    attempt.release()
    attempt.release()
    assert released == ["slice"]


def test_a_withdrawn_attempt_leaves_no_headers_and_no_tokens() -> None:
    exchange = exchange_of()
    exchange.extra_headers.append((b"x-before", b"1"))
    attempt = attempt_of(exchange)
    attempt.note_model("small", MODEL, "alias")
    attempt.note_replica("r1", {"pool": "batch", "region": "eu", "why": "class"})
    assert (b"x-penstock-pool", b"batch") in exchange.extra_headers
    exchange.record.prompt_tokens, exchange.record.finish_reason = 7, "error"
    attempt.withdraw()
    assert exchange.extra_headers == [(b"x-before", b"1")]
    assert exchange.record.prompt_tokens == 0 and exchange.record.finish_reason is None


def test_the_reply_names_the_model_and_why_it_was_taken() -> None:
    exchange = exchange_of()
    attempt_of(exchange).note_model("small", MODEL, "alias")
    assert dict(exchange.extra_headers) == {b"x-penstock-model": b"tiny-de", b"x-penstock-route": b"alias"}
    assert (exchange.record.model_version, exchange.record.adapter_id) == ("tiny", "de")
    fallback = attempt_of(exchange_of(), reason="fallback", is_fallback=True)
    fallback.note_model("small", MODEL, "alias")
    assert fallback.route == "fallback", "the reason of the attempt comes before that of the name"


def test_requests_of_a_session_stay_together_unless_they_name_a_key() -> None:
    attempt = attempt_of(exchange_of(headers=((b"x-session-id", b"s1"),)))
    assert (attempt.affinity(None), attempt.affinity("key")) == ("s1", "key")


def test_a_line_of_a_batch_has_the_same_ids_however_often_it_is_tried() -> None:
    line = BatchLine("batch_1", 3)
    first, second = AnswerIds(exchange_of(line)), AnswerIds(exchange_of(line))
    ids = [first.next(), first.next()]
    assert ids == [second.next(), second.next()] and len(set(ids)) == 2
    client = AnswerIds(exchange_of())
    assert client.next() != client.next()
