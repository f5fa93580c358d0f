"""Thoughts as `encrypted_content`: clients that keep nothing on the server send it back with the next request.

The thought is in the response beside it anyway, so it is packed, not encrypted: the field exists because clients drop
the text of reasoning items and keep this.
"""

from __future__ import annotations

import base64
import binascii
import zlib

_PREFIX = "penstock-1."
_MOST = 1 << 20
"""Characters of a thought that is unpacked."""


def sealed(thought: str) -> str:
    return _PREFIX + base64.urlsafe_b64encode(zlib.compress(thought.encode())).decode()


def opened(content: str | None) -> str:
    """The thought; empty where another server has made it, or it is damaged."""
    if content is None or not content.startswith(_PREFIX):
        return ""
    try:
        data = base64.b64decode(content.removeprefix(_PREFIX), altchars=b"-_", validate=True)
        return zlib.decompressobj().decompress(data, _MOST).decode("utf-8", "ignore")
    except (binascii.Error, zlib.error, ValueError):
        return ""
