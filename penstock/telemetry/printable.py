"""Text of clients, made safe for a terminal: control characters, with which a terminal can be made to hide or forge
what it shows, are written as escapes."""

from __future__ import annotations

import re

_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters (also the 8-bit ones), other line ends, changes of the writing direction, half characters."""
_NAMED = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}


def printable(text: str, *, keep: str = "") -> str:
    """`text` without control characters, except those in `keep`."""
    if text.isprintable():
        return text
    return _UNSAFE.sub(lambda found: found[0] if found[0] in keep else _escaped(found[0]), text)


def printable_json(text: str, *, keep: str = "") -> str:
    """JSON without the control characters that JSON allows in strings. `keep`: those between its tokens."""
    if text.isprintable():
        return text
    return _UNSAFE.sub(lambda found: found[0] if found[0] in keep else f"\\u{ord(found[0]):04x}", text)


def _escaped(character: str) -> str:
    code = ord(character)
    return _NAMED.get(character) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")
