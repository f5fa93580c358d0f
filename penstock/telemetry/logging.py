"""Structured logs: one JSON object or one readable line per record, with request ids and without prompt text.

Fields go in `extra=`; everything logged while a request is answered also gets the request id and the trace id. The
logger `penstock.request` writes one record per request with the fields of `RequestRecord`, which also feeds the request
log (`metering/request_log.py`).
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any, Literal, TextIO

import msgspec

from penstock.telemetry.context import current
from penstock.telemetry.printable import printable, printable_json

LogFormat = Literal["text", "json"]

_STANDARD = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {"message", "asctime", "taskName"}
_requests = logging.getLogger("penstock.request")


class RequestRecord(msgspec.Struct, omit_defaults=False):
    """The recorded facts of a request; never its text."""

    request_id: str
    route: str
    timestamp: float
    status: int = 0
    user_id: str | None = None
    tenant: str | None = None
    model_version: str | None = None
    adapter_id: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft_ms: float | None = None
    total_latency_ms: float = 0.0
    finish_reason: str | None = None
    metadata: dict[str, str] | None = None
    reasoning_tokens: int = 0
    """Of the completion tokens, those of thoughts."""
    experiment: str | None = None
    """The experiment and the arm that it was in: `NAME; arm=ARM`."""


def log_request(record: RequestRecord, more: dict[str, Any] | None = None) -> None:
    if _requests.isEnabledFor(logging.INFO):
        fields = msgspec.structs.asdict(record)
        for name in ("experiment", "reasoning_tokens"):
            if not fields[name]:
                del fields[name]
        _requests.info("request", extra={**fields, **(more or {})})


def configure(fmt: LogFormat = "text", level: str = "INFO", stream: TextIO | None = None) -> None:
    """Sends Penstock's logs, and warnings of libraries, to `stream` (by default standard error)."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if fmt == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("penstock").setLevel(level.upper())


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = {key: value for key, value in vars(record).items() if key not in _STANDARD}
    context = current.get()
    if context is not None:
        fields.setdefault("request_id", context.request_id)
        if context.trace is not None:
            fields.setdefault("trace_id", context.trace.trace_id)
    return fields


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _timestamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return printable_json(msgspec.json.encode(entry, enc_hook=str).decode())


class TextFormatter(logging.Formatter):
    """One line per record, whatever clients put into it; the lines of a traceback are indented."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = "".join(f" {key}={_brief(value)}" for key, value in _fields(record).items() if value is not None)
        lines = [f"{clock} {record.levelname.lower():7} {record.getMessage()}{fields}"]
        if record.exc_info:
            lines += (f"  {line}" for line in self.formatException(record.exc_info).split("\n"))
        return "\n".join(map(printable, lines))


def _brief(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}" if abs(value) < 1e6 else f"{value:.3f}"
    text = str(value)
    return text if text and not any(c.isspace() or c == '"' for c in text) else msgspec.json.encode(text).decode()


def _timestamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03d}Z"
