"""The tokenizer of an encoder model: texts and pairs of texts to token ids.

A control token spelled out in a text (`[SEP]`) is ordinary text: a caller cannot inject a separator.
The tokenizer releases the interpreter lock, so threads may share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from penstock.text.loader import read_tokenizer
from penstock.text.tokenizer_calls import encode_ids


class EncoderText:
    """One encoder's tokenizer."""

    def __init__(self, tokenizer: Tokenizer, folder: Path | None = None) -> None:
        """`folder`: where it was read from, for a process that has to read it again."""
        self.folder = folder
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        empty: list[int] = tokenizer.encode("").ids
        self.first, self.last = empty[0], empty[-1]
        """Special tokens before and after every text."""

    def encode(self, texts: Sequence[str], most: int | None = None) -> list[list[int]]:
        """Token ids with special tokens. Of a text with more than `most` tokens only the first, more than `most`."""
        return [encode_ids(self._tokenizer, text, add_special_tokens=True, most=most) for text in texts]

    def encode_pairs(self, query: str, documents: Sequence[str], limit: int) -> tuple[list[list[int]], list[int]]:
        """Query-document pairs and where each document begins; long documents are truncated."""
        (asked,) = self.encode([query], limit)
        pairs = [[*asked, *document[1:]] for document in self.encode(documents, limit)]
        return [self.cut(pair, limit) for pair in pairs], [len(asked)] * len(pairs)

    def spelled(self, texts: Sequence[str]) -> list[list[str]]:
        """The tokens of texts as spelled in the vocabulary, without special tokens."""
        return [found.tokens for found in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def count(self, text: str) -> int:
        """The number of tokens without special tokens."""
        return len(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0])

    def beginnings(self, texts: Sequence[str], most: int) -> list[str]:
        """Texts up to their first `most` tokens, special tokens not counted."""
        found = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [
            text if len(each.ids) <= most else text[: each.offsets[most - 1][1]]
            for text, each in zip(texts, found, strict=True)
        ]

    def cut(self, ids: list[int], limit: int) -> list[int]:
        """The ids truncated to `limit`, with the final special token kept."""
        return ids if len(ids) <= limit else [*ids[: limit - 1], self.last]


def load_encoder_text(folder: Path) -> EncoderText:
    return EncoderText(read_tokenizer(folder), folder)
