"""What clients write cannot steer the terminal of whoever reads logs."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from penstock.telemetry import logging as telemetry_logging
from penstock.telemetry.logging import LogFormat
from penstock.telemetry.printable import printable
from tests.gateway.conftest import Serving, serving, text

__all__ = ["serving", "text"]

HOSTILE = "\x1b]0;owned\x07\x1b[2Jann\x9b31m\u202e\r\n13:00:00 info    forged\u2028\x00\x7f"
CONTROLS = "\x00\x07\x08\x0b\x0c\r\x1b\x7f\x80\x9b\x9f\u2028\u2029\u202e\u2066"


@contextmanager
def written(fmt: LogFormat) -> Iterator[io.StringIO]:
    root, penstock = logging.getLogger(), logging.getLogger("penstock")
    handlers, levels = list(root.handlers), (root.level, penstock.level)
    stream = io.StringIO()
    telemetry_logging.configure(fmt, "DEBUG", stream)
    try:
        yield stream
    finally:
        root.handlers[:] = handlers
        root.setLevel(levels[0])
        penstock.setLevel(levels[1])


@pytest.mark.parametrize("fmt", ["text", "json"])
def test_control_characters_do_not_reach_the_log(fmt: LogFormat) -> None:
    with written(fmt) as log:
        logger = logging.getLogger("penstock.test")
        logger.info("message %s", HOSTILE, extra={"user_id": HOSTILE, "where": {"deep": HOSTILE}})
        try:
            raise ValueError(HOSTILE)
        except ValueError:
            logger.exception("failed")
    said = log.getvalue()
    assert not set(said) & set(CONTROLS), said
    assert "ann" in said and "\\u202e" in said
    if fmt == "json":
        assert [json.loads(line)["message"] for line in said.splitlines()] == [f"message {HOSTILE}", "failed"]
        assert json.loads(said.splitlines()[0])["user_id"] == HOSTILE
    else:
        records = [line for line in said.splitlines() if not line.startswith("  ")]
        assert len(records) == 2 and not any(line.startswith("13:00:00 info    forged") for line in said.splitlines())


def test_other_text_stays_as_it_is() -> None:
    plain = "Grüße, 日本 👩‍💻 ﷺ"
    assert printable(plain) == plain
    assert printable("a\tb\nc\x1b", keep="\n\t") == "a\tb\nc\\x1b"
    assert printable("a\nb\r\t") == "a\\nb\\r\\t"
    assert printable("\ud800\x9b") == "\\ud800\\x9b"


async def test_no_field_of_a_request_brings_them_in(serving: Serving) -> None:
    with written("text") as log:
        async with serving() as gateway:
            await gateway.chat(user=HOSTILE, metadata={HOSTILE: HOSTILE})
            await gateway.chat(model=HOSTILE)
            await gateway.client.get("/v1/%1b%5b2J%0aforged")
            await gateway.client.get("/v1/models/%1b%5b2J%0aforged", headers={"user-agent": b"\x1b[2J"})
            await gateway.client.get("/v1/models", headers={"x-feature": b"\x9b2J", "traceparent": b"\x9b2J"})
    said = log.getvalue()
    assert "ann" in said, "the requests are logged"
    assert not set(said) & set(CONTROLS), said
