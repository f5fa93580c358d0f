"""Texts as `encrypted_content`, or as the `signature` of a thinking block whose text is left out: clients that keep
nothing on the server send it back with the next request.

They are packed, not encrypted: a thought is the caller's own answer, and these fields exist because clients drop its
text and keep them; the summary of a compacted conversation is about what the client itself sent.
"""

from __future__ import annotations

import base64
import binascii
import zlib

THOUGHT = "penstock-1."
SUMMARY = "penstock-summary-1."
"""How the content begins, by what it is."""
_MOST = 1 << 20
"""Characters of a text that is unpacked."""


def sealed(text: str, kind: str = THOUGHT) -> str:
    return kind + base64.urlsafe_b64encode(zlib.compress(text.encode())).decode()


def opened(content: str | None, kind: str = THOUGHT) -> str:
    """The text; empty where another server has made it, or it is damaged."""
    if content is None or not content.startswith(kind):
        return ""
    try:
        data = base64.b64decode(content.removeprefix(kind), altchars=b"-_", validate=True)
        return zlib.decompressobj().decompress(data, _MOST).decode("utf-8", "ignore")
    except (binascii.Error, zlib.error, ValueError):
        return ""
