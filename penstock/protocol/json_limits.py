"""A bound on how long JSON takes to decode, checked before it is decoded.

Decoding holds the interpreter lock from beginning to end. Four megabytes of one string take two milliseconds; four
megabytes of `{},{},{}` take hundreds. So what costs time is counted first, with searches that are far cheaper than
decoding: strings, containers and values. Small bodies need no check.
"""

from __future__ import annotations

FREE_BYTES = 128 << 10
"""JSON up to this size is decoded whatever is in it."""
MOST_STRINGS = 1 << 17
MOST_CONTAINERS = 1 << 16
MOST_VALUES = 1 << 19
_QUOTES = 4096
"""Quotes that the quick check looks at."""
_LOOK_BACK = 64


def excess(body: bytes) -> str | None:
    """What a JSON text has too many of, with the limit; None when it may be decoded. Works for malformed text too."""
    if len(body) <= FREE_BYTES or _few_long_strings(body) or _counted(body) is None:
        return None
    # Text inside strings does not count: what is left without it?
    if b'\\"' in body:
        # An escaped quote does not end a string, unless its backslash is itself escaped.
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    parts = body.split(b'"', 2 * MOST_STRINGS + 1)
    return _counted(b'""'.join(parts[::2]) if len(parts) <= 2 * MOST_STRINGS + 1 else body)


def _few_long_strings(body: bytes) -> bool:
    """Whether nearly all of a text is in a few strings, as in a request with a long prompt."""
    at = bare = 0
    inside = False
    for _ in range(_QUOTES):
        quote = body.find(b'"', at)
        end = len(body) if quote < 0 else quote
        if not inside:
            bare += end - at
        if quote < 0 or bare > FREE_BYTES:
            break
        backslashes = _backslashes(body, quote) if inside else 0
        if backslashes == _LOOK_BACK:
            return False  # perhaps more: this is no ordinary text
        if backslashes % 2 == 0:
            inside = not inside
        at = quote + 1
    else:
        return False
    return bare <= FREE_BYTES


def _backslashes(body: bytes, end: int) -> int:
    """How many backslashes stand before `end`, up to `_LOOK_BACK`."""
    before = body[max(0, end - _LOOK_BACK) : end]
    return len(before) - len(before.rstrip(b"\\"))


def _counted(text: bytes) -> str | None:
    if text.count(b'"') > 2 * MOST_STRINGS:
        return f"more than {MOST_STRINGS:,} strings"
    if text.count(b",") > MOST_VALUES:
        return f"more than {MOST_VALUES:,} values"
    if text.count(b"{") + text.count(b"[") > MOST_CONTAINERS:
        return f"more than {MOST_CONTAINERS:,} objects and lists"
    return None
