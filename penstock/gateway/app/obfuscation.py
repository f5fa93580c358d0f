"""Streams whose events do not tell how long their text is: `stream_options.include_obfuscation` of OpenAI's API.

Whoever sees the sizes of encrypted packets can guess words from the lengths of tokens. Events with new text get a field
`obfuscation` of random characters, so that every event has a multiple of `STEP` bytes.
"""

from __future__ import annotations

import base64
import os

STEP = 64
_FIELD = b',"obfuscation":"'
_TEXT = (b'"delta":', b'"choices":[{')
"""What events with new text have. Inside of strings these quotes are escaped, so only fields are found."""


def obfuscated(events: bytes) -> bytes:
    """Events as renderers write them, each with an empty line behind it."""
    return b"\n\n".join(map(_padded, events.split(b"\n\n")))


def _padded(event: bytes) -> bytes:
    if not event.endswith(b"}") or not any(mark in event for mark in _TEXT):
        return event
    size = -(len(event) + len(_FIELD) + 1) % STEP
    return event[:-1] + _FIELD + base64.b64encode(os.urandom(STEP))[:size] + b'"}'
