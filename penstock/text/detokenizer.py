"""Incremental detokenization: token ids to text as they arrive.

Text is the concatenation of the tokens' bytes, read as UTF-8 with malformed bytes replaced. That rule is a fold
over tokens, so text can be emitted as soon as its last byte is known: a token costs time proportional to its own
length, no character is ever emitted in halves, and what is emitted adds up to exactly `TextModel.decode`.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol

_utf8 = codecs.getincrementaldecoder("utf-8")


class Vocabulary(Protocol):
    """The part of a tokenizer that the detokenizer needs."""

    @property
    def strips_first_space(self) -> bool:
        """Whether a leading space is an artefact of the encoding and not part of the text."""
        ...

    def token_bytes(self, token: int) -> bytes: ...

    def is_special(self, token: int) -> bool: ...

    def begins_text(self, token: int) -> bool:
        """Whether the text behind this token was encoded like the beginning of a text."""
        ...


class IncrementalDetokenizer:
    """Decodes one sequence of tokens, a few at a time.

    With `continuation` the tokens continue a text instead of beginning one, so a leading space is kept. Without
    `skip_special` the text is exactly that which was encoded: where a tokenizer puts a space behind control tokens as
    it does at the beginning, that space goes too.
    """

    __slots__ = ("_decoder", "_shown", "_skip_special", "_strip", "_vocabulary")

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        skip_special: bool = True,
        continuation: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._vocabulary = vocabulary
        self._shown = shown
        self._skip_special = skip_special
        self._strip = vocabulary.strips_first_space and not continuation
        self._decoder = _utf8("replace")

    def push(self, tokens: Iterable[int]) -> str:
        """The text completed by these tokens. Bytes of an unfinished character are kept for the next call."""
        vocabulary = self._vocabulary
        if self._skip_special:
            shown = self._shown
            data = b"".join(
                [
                    vocabulary.token_bytes(token)
                    for token in tokens
                    if not vocabulary.is_special(token) or token in shown
                ]
            )
        elif vocabulary.strips_first_space:
            return "".join(map(self._exact, tokens))
        else:
            data = b"".join([vocabulary.token_bytes(token) for token in tokens])
        return self._first(self._decoder.decode(data)) if data else ""

    def _exact(self, token: int) -> str:
        text = self._decoder.decode(self._vocabulary.token_bytes(token))
        if self._vocabulary.begins_text(token):
            self._strip = True
            return text
        return self._first(text)

    def flush(self) -> str:
        """The rest when no token follows: a replacement character if a character is incomplete."""
        return self._first(self._decoder.decode(b"", final=True))

    def _first(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text
