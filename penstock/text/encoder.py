"""The tokenizer of an encoder model: texts and pairs of texts to token ids.

A control token spelled out in a text (`[SEP]`) is ordinary text: a caller cannot inject a separator.
The tokenizer releases the interpreter lock, so threads may share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from penstock.text.loader import read_tokenizer


class EncoderText:
    """One encoder's tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        empty: list[int] = tokenizer.encode("").ids
        self.first, self.last = empty[0], empty[-1]
        """Special tokens before and after every text."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids with special tokens."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts))]

    def encode_pairs(self, query: str, documents: Sequence[str], limit: int) -> tuple[list[list[int]], list[int]]:
        """Query-document pairs and where each document begins; long documents are truncated."""
        (asked,) = self.encode([query])
        pairs = [[*asked, *document[1:]] for document in self.encode(documents)]
        return [self.cut(pair, limit) for pair in pairs], [len(asked)] * len(pairs)

    def spelled(self, text: str) -> list[str]:
        """The tokens as spelled in the vocabulary, without special tokens."""
        tokens: list[str] = self._tokenizer.encode(text, add_special_tokens=False).tokens
        return tokens

    def cut(self, ids: list[int], limit: int) -> list[int]:
        """The ids truncated to `limit`, with the final special token kept."""
        return ids if len(ids) <= limit else [*ids[: limit - 1], self.last]


def load_encoder_text(folder: Path) -> EncoderText:
    return EncoderText(read_tokenizer(folder))
