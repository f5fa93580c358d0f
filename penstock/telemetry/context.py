"""The request that is being answered: its id and its place in a distributed trace (W3C Trace Context).

Set once per request, read by whatever runs inside it: log records get the ids, and calls to other servers carry them on
(`outgoing_headers`). What a client sends is accepted as its trace; without tracing it is passed on untouched.
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
    """Our span in a trace, and the caller's above it."""

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
    """What a client says of its trace; None when it says nothing that can be understood.

    `span_id` is the caller's: passed on like this, its trace goes on as if we were not there."""
    found = None if traceparent is None else _TRACEPARENT.fullmatch(traceparent.strip())
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == b"ff" or (version == b"00" and more) or not trace_id.strip(b"0") or not span_id.strip(b"0"):
        return None
    state = "" if tracestate is None or len(tracestate) > _STATE_LENGTH else tracestate.decode("latin-1").strip()
    return TraceContext(trace_id.decode(), span_id.decode(), sampled=bool(int(flags, 16) & 1), state=state)


def begin_span(caller: TraceContext | None, share: float) -> TraceContext:
    """A span of our own: in the caller's trace, sampled as the caller is, or the first of a new one, of which `share`
    are sampled."""
    span_id = secrets.token_hex(8)
    if caller is not None:
        return TraceContext(caller.trace_id, span_id, caller.span_id, caller.sampled, caller.state)
    trace_id = secrets.token_hex(16)
    # Decided by the id, as other tracers do, so that processes that see the same trace agree.
    return TraceContext(trace_id, span_id, sampled=int(trace_id[16:], 16) < share * 2**64)


def sampled_trace() -> str | None:
    """The id of the trace around us, when it is recorded."""
    context = current.get()
    if context is None or context.trace is None or not context.trace.sampled:
        return None
    return context.trace.trace_id


def outgoing_headers() -> dict[str, str]:
    """What a call to another server carries so that its logs and spans can be found from this request."""
    context = current.get()
    if context is None:
        return {}
    return {"x-request-id": context.request_id, **({} if context.trace is None else context.trace.headers())}
