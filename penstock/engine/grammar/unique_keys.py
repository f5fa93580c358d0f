"""No key twice in a JSON object: what a context-free grammar cannot say where keys are free or follow a pattern.

The scanner follows the bytes of the accepted tokens and knows the keys of every open object. Before a token is sampled,
the tokens that would complete a key the object has already are taken out of the mask. A grammar asks for this with a
header line, which says where in the text JSON begins.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

JsonStart = str | int
"""The text or control token behind which JSON begins; an empty text: at the beginning."""

_HEADER = "#json "
_OUTSIDE, _KEY, _VALUE = range(3)
_STRUCTURE = re.compile(rb'["{}\[\],]')
_IN_STRING = re.compile(rb'["\\]')
_QUOTE = 0x22


def with_header(start: JsonStart, grammar: str) -> str:
    return f"{_HEADER}{json.dumps(start)}\n{grammar}"


def split_header(grammar: str) -> tuple[JsonStart | None, str]:
    """Where JSON begins, if the keys of its objects must be unique, and the grammar itself."""
    if not grammar.startswith(_HEADER):
        return None, grammar
    header, _, body = grammar.partition("\n")
    return json.loads(header[len(_HEADER) :]), body


class TokenIndex:
    """The tokens of a vocabulary that stand for text, found by how they begin and by the keys inside them."""

    def __init__(self, tokens: Sequence[bytes], special: frozenset[int]) -> None:
        self.tokens = tokens
        self.special = special
        pairs = sorted((name, token) for token, name in enumerate(tokens) if name and token not in special)
        self._names = [name for name, _ in pairs]
        self._ids = np.array([token for _, token in pairs], np.int64)
        self.with_key: dict[bytes, list[int]] = {}
        """Tokens by each text that they have between two quotes."""
        for name, token in pairs:
            for inner in name.split(b'"')[1:-1]:
                self.with_key.setdefault(inner, []).append(token)

    def starting_with(self, prefix: bytes) -> np.ndarray:
        """Ids of the tokens that begin with `prefix`, which ends with a quote."""
        begin = bisect_left(self._names, prefix)
        return self._ids[begin : bisect_left(self._names, prefix[:-1] + bytes([prefix[-1] + 1]), begin)]


class UniqueKeys:
    """The place of one sequence in its JSON."""

    __slots__ = (
        "_active",
        "_at_key",
        "_escaped",
        "_index",
        "_key",
        "_open",
        "_risky",
        "_start",
        "_tail",
        "_where",
        "repeated",
    )

    def __init__(self, index: TokenIndex, start: JsonStart) -> None:
        self._index = index
        self._start = start
        self._active = start == ""
        self._tail = b""
        self._open: list[dict[bytes, bytes] | None] = []
        """The keys of every open object, as they are and as they are written; None for an array."""
        self._where = _OUTSIDE
        self._at_key = False
        """Whether a string that begins now is a key."""
        self._escaped = False
        self._key = bytearray()
        self._risky: list[bytes] = []
        """Keys so far that a single token could repeat whole."""
        self.repeated = False
        """Whether a key came twice: it was written in another way."""

    def copy(self) -> UniqueKeys:
        """A scanner at the beginning: only matchers that have taken no token are copied."""
        return UniqueKeys(self._index, self._start)

    def accept(self, token: int) -> None:
        if token in self._index.special:
            self._active = self._active or token == self._start
            return
        name = self._index.tokens[token]
        if self._active:
            self._scan(name)
        elif isinstance(self._start, str):
            wanted = self._start.encode()
            self._tail += name
            at = self._tail.find(wanted)
            if at >= 0:
                self._active = True
                self._scan(self._tail[at + len(wanted) :])
            else:
                self._tail = self._tail[-len(wanted) :]

    def restrict(self, mask: np.ndarray) -> None:
        """Take the tokens that would repeat a key out of `mask`."""
        if self._where == _KEY and not self._escaped and (keys := self._open[-1]):
            begun = bytes(self._key)
            for written in keys.values():
                if written.startswith(begun):
                    _remove(mask, self._index.starting_with(written[len(begun) :] + b'"'))
        for key in self._risky:
            for token in self._index.with_key[key]:
                if mask[token >> 5] >> (token & 31) & 1 and self._would_repeat(token):
                    _remove(mask, np.array([token], np.int64))

    def _would_repeat(self, token: int) -> bool:
        ahead = UniqueKeys(self._index, "")
        ahead._open = [None if keys is None else dict(keys) for keys in self._open]
        ahead._where, ahead._at_key, ahead._escaped = self._where, self._at_key, self._escaped
        ahead._key = bytearray(self._key)
        ahead._scan(self._index.tokens[token])
        return ahead.repeated

    def _scan(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            if self._where == _OUTSIDE:
                found = _STRUCTURE.search(data, at)
                if found is None:
                    return
                at = found.end()
                self._structure(data[at - 1])
            elif self._escaped:
                self._key.append(data[at])
                self._escaped = False
                at += 1
            else:
                found = _IN_STRING.search(data, at)
                end = len(data) if found is None else found.start()
                if self._where == _KEY:
                    self._key += data[at:end]
                if found is None:
                    return
                at = end + 1
                if data[end] == _QUOTE:
                    if self._where == _KEY:
                        self._complete_key()
                    self._where = _OUTSIDE
                else:
                    self._key.append(data[end])
                    self._escaped = True

    def _structure(self, byte: int) -> None:
        match byte:
            case 0x22:
                self._where = _KEY if self._at_key else _VALUE
                self._key.clear()
                self._at_key = False
            case 0x7B:  # {
                self._open.append({})
                self._at_key = True
            case 0x5B:  # [
                self._open.append(None)
                self._at_key = False
            case 0x2C:  # ,
                self._at_key = bool(self._open) and self._open[-1] is not None
            case _:
                if self._open:
                    self._open.pop()
                self._at_key = False

    def _complete_key(self) -> None:
        written = bytes(self._key)
        key = written
        if b"\\" in written:
            key = json.loads(b'"' + written + b'"').encode(errors="surrogatepass")
        keys = self._open[-1]
        assert keys is not None
        self.repeated = self.repeated or key in keys
        keys[key] = written
        if written in self._index.with_key:
            self._risky.append(written)


def _remove(mask: np.ndarray, tokens: np.ndarray) -> None:
    np.bitwise_and.at(mask.view(np.uint32), tokens // 32, ~(np.uint32(1) << (tokens % 32).astype(np.uint32)))
