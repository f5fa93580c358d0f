"""Structured logs: ids in, prompt text out."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from penstock.telemetry.logging import RequestRecord, configure, log_request


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root, project = logging.getLogger(), logging.getLogger("penstock")
    before = root.handlers[:], root.level, project.level
    yield io.StringIO()
    root.handlers[:], root.level = before[0], before[1]
    project.setLevel(before[2])


def test_the_request_line_has_exactly_the_fields_of_the_request_log(stream: io.StringIO) -> None:
    configure("json", "info", stream)
    log_request(RequestRecord("req_1", "/v1/chat/completions", 12.5, prompt_tokens=3, finish_reason="stop"))
    line = json.loads(stream.getvalue())
    fields = {
        "request_id", "user_id", "tenant", "model_version", "adapter_id", "prompt_tokens", "cached_tokens",
        "completion_tokens", "ttft_ms", "total_latency_ms", "finish_reason", "route", "timestamp",
    }  # fmt: skip
    assert set(line) - {"time", "level", "logger", "message"} == fields | {"status", "metadata"}
    assert (line["request_id"], line["prompt_tokens"], line["finish_reason"]) == ("req_1", 3, "stop")


def test_text_lines_are_one_line_with_key_and_value(stream: io.StringIO) -> None:
    configure("text", "info", stream)
    logging.getLogger("penstock.x").info("hello", extra={"a": 1, "b": "two words\n", "c": None})
    logging.getLogger("penstock.x").debug("not shown")
    [line] = stream.getvalue().splitlines()
    assert line.endswith('hello a=1 b="two words\\n"')


def test_exceptions_and_odd_values_are_written(stream: io.StringIO) -> None:
    configure("json", "info", stream)
    try:
        raise ValueError("kaput")
    except ValueError:
        logging.getLogger("penstock.x").exception("failed", extra={"odd": object()})
    line = json.loads(stream.getvalue())
    assert "kaput" in line["exception"]
    assert "object" in line["odd"]
