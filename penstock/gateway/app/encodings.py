"""`Content-Encoding` of request bodies: what gzip and deflate hold, never more than the caller has room for."""

from __future__ import annotations

import zlib

from penstock.protocol.errors import InvalidRequest, UnsupportedEncoding

ACCEPTED = ("gzip", "deflate")
MOST_MEMBERS = 1000
"""A gzip file may be several one after the other."""
_WINDOW = {"gzip": 31, "x-gzip": 31, "deflate": 15}


class Inflater:
    """Decodes one body, piece by piece."""

    def __init__(self, encoding: str) -> None:
        self._window = _WINDOW[encoding]
        self._decoder = zlib.decompressobj(self._window)
        self._members = 1

    def feed(self, data: bytes, most: int) -> bytes:
        """What `data` holds, but at most `most` bytes of it. Raises `InvalidRequest` if it is malformed."""
        out = []
        try:
            while data and most > 0:
                if self._decoder.eof:
                    self._next()
                found = self._decoder.decompress(data, most)
                out.append(found)
                most -= len(found)
                data = self._decoder.unused_data if self._decoder.eof else self._decoder.unconsumed_tail
        except zlib.error as error:
            raise InvalidRequest(f"The request body cannot be decoded: {error}.", code="invalid_encoding") from None
        return out[0] if len(out) == 1 else b"".join(out)

    def finish(self) -> None:
        if not self._decoder.eof:
            raise InvalidRequest("The encoded request body is incomplete.", code="invalid_encoding")

    def _next(self) -> None:
        self._members += 1
        if self._window != _WINDOW["gzip"] or self._members > MOST_MEMBERS:
            raise InvalidRequest("Something follows the encoded request body.", code="invalid_encoding")
        self._decoder = zlib.decompressobj(self._window)


def inflater(header: bytes | None) -> Inflater | None:
    """The decoder for a `Content-Encoding`; None when the body is not encoded."""
    encoding = (header or b"").decode("latin-1").strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding not in _WINDOW:
        raise UnsupportedEncoding(encoding, ACCEPTED)
    return Inflater(encoding)
