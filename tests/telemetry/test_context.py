"""W3C trace context: what is accepted, what is passed on, what is sampled."""

from __future__ import annotations

import pytest

from penstock.telemetry.context import (
    RequestContext,
    begin_span,
    current,
    outgoing_headers,
    read_trace,
    sampled_trace,
)

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_client_s_trace_is_passed_on_untouched_when_we_do_not_trace() -> None:
    trace = read_trace(f"00-{TRACE}-{SPAN}-01".encode(), b"vendor=1")
    current.set(RequestContext("r", trace))
    expected = {"x-request-id": "r", "traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}
    assert outgoing_headers() == expected
    current.set(None)
    assert outgoing_headers() == {}


def test_our_span_takes_the_caller_s_place_when_we_do() -> None:
    caller = read_trace(f"00-{TRACE}-{SPAN}-00".encode(), None)
    ours = begin_span(caller, share=1.0)
    assert (ours.trace_id, ours.parent_id, ours.sampled) == (TRACE, SPAN, False), "the caller decides"
    assert ours.span_id not in (SPAN, "")
    current.set(RequestContext("r", ours))
    assert sampled_trace() is None
    assert outgoing_headers()["traceparent"] == f"00-{TRACE}-{ours.span_id}-00"
    current.set(None)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"00-xyz",
        f"00-{'0' * 32}-{SPAN}-01".encode(),
        f"00-{TRACE}-{'0' * 16}-01".encode(),
        f"ff-{TRACE}-{SPAN}-01".encode(),
        f"00-{TRACE}-{SPAN}-01-more".encode(),
        f"00-{TRACE.upper()}-{SPAN}-01".encode(),
    ],
)
def test_what_is_no_trace_is_ignored(header: bytes) -> None:
    assert read_trace(header, b"x=1") is None


def test_later_versions_are_read_as_far_as_they_are_known() -> None:
    assert read_trace(f"01-{TRACE}-{SPAN}-01-more".encode(), None) is not None


def test_the_share_that_is_sampled() -> None:
    assert not any(begin_span(None, 0.0).sampled for _ in range(100))
    assert all(begin_span(None, 1.0).sampled for _ in range(100))
    assert 250 < sum(begin_span(None, 0.5).sampled for _ in range(1000)) < 750
