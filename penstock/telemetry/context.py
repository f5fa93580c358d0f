"""The current request: its id and its place in a distributed trace (W3C Trace Context).

Set once per request and read by everything that runs inside it: log records get the ids, and calls to other servers
carry them on (`outgoing_headers`). A client's trace context is accepted; without tracing it is passed on unchanged.
"""

from __future__ import annotations

import re
import secrets
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE_LENGTH = 512


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Our span in a trace, and the caller's span as its parent."""

    trace_id: str
    span_id: str
    parent_id: str = ""
    """The caller's span; empty when the trace begins here."""
    sampled: bool = True
    state: str = ""

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"

    def headers(self) -> dict[str, str]:
        return {"traceparent": self.traceparent, **({"tracestate": self.state} if self.state else {})}


class RequestContext(NamedTuple):
    request_id: str
    trace: TraceContext | None = None


current: ContextVar[RequestContext | None] = ContextVar("penstock request", default=None)


def read_trace(traceparent: bytes | None, tracestate: bytes | None) -> TraceContext | None:
    """The client's trace context; None when it is missing or invalid.

    `span_id` is the caller's: passed on unchanged, the trace continues as if this server were not in it."""
    found = None if traceparent is None else _TRACEPARENT.fullmatch(traceparent.strip())
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == b"ff" or (version == b"00" and more) or not trace_id.strip(b"0") or not span_id.strip(b"0"):
        return None
    state = "" if tracestate is None or len(tracestate) > _STATE_LENGTH else tracestate.decode("latin-1").strip()
    return TraceContext(trace_id.decode(), span_id.decode(), sampled=bool(int(flags, 16) & 1), state=state)


def begin_span(caller: TraceContext | None, share: float) -> TraceContext:
    """A new span: in the caller's trace, sampled if the caller is, or the root of a new trace, sampled with probability
    `share`."""
    span_id = secrets.token_hex(8)
    if caller is not None:
        return TraceContext(caller.trace_id, span_id, caller.span_id, caller.sampled, caller.state)
    trace_id = secrets.token_hex(16)
    # Decided by the trace id, as other tracers do, so that all processes that see a trace agree.
    return TraceContext(trace_id, span_id, sampled=int(trace_id[16:], 16) < share * 2**64)


def sampled_trace() -> str | None:
    """The id of the current trace, if it is sampled."""
    context = current.get()
    if context is None or context.trace is None or not context.trace.sampled:
        return None
    return context.trace.trace_id


def outgoing_headers() -> dict[str, str]:
    """Headers for a call to another server, which connect its logs and spans with this request."""
    context = current.get()
    if context is None:
        return {}
    return {"x-request-id": context.request_id, **({} if context.trace is None else context.trace.headers())}
