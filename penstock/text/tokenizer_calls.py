"""Calls of the tokenizer library that release the interpreter lock, and stop early on text that is far too long.

`Tokenizer.encode` holds the lock for as long as it works, over a second per megabyte; the batch calls do not, and are
faster, as they record no offsets. What still holds it is making Python objects of the result, so a result that
is far too long is never made: with `most`, such text is counted piece by piece first, and `most + 1` ids come back.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

from penstock.text.token_bytes import BYTE_OF_LETTER

# The library's own threads have the priority of the process; ours have a lower one, and tenants share them fairly.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

PIECE = 1 << 16
"""Characters counted by one call: about 50 ms of work."""
_LEAST_PIECE = 1 << 12
BYTES_PER_TOKEN = 6
"""Text with fewer bytes per allowed token than this is encoded at once: it probably fits."""
CUT_TOKENS = 16
"""A cut between two pieces adds at most this many tokens; in practice one or two."""
_GAP = re.compile(r"\S\s")
_GAP_WITHIN = 256
_KEEPS_ALL = {"ByteLevel", "Digits", "Metaspace"}
_CONTROL = frozenset(range(0x20)) - frozenset(b"\t\n\r") | {0x7F}
_RARE = frozenset([0xC0, 0xC1, *range(0xF1, 0x100)])
"""Bytes that are not in UTF-8, and the first of characters that nobody has assigned: three others follow those."""
_LETTERS = {letter for letter, byte in BYTE_OF_LETTER.items() if byte not in _CONTROL | _RARE}
"""What a byte-level vocabulary must contain to drop no text."""
_NFC_SHRINKS = 3
"""The most bytes that NFC makes one of: three Hangul letters of three bytes each are one syllable of three."""


def encode_ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool, most: int | None = None) -> list[int]:
    """The token ids of a text. If they are many more than `most`, the first `most + 1` of them."""
    begin = None
    if most is not None and len(text) * 4 > BYTES_PER_TOKEN * most and utf8_size(text) > BYTES_PER_TOKEN * most:
        begin = beginning(tokenizer, text, most)
    encoding = tokenizer.encode_batch_fast([begin or text], add_special_tokens=add_special_tokens)[0]
    if begin is not None and most is not None:
        encoding.truncate(most + 1)
    ids: list[int] = encoding.ids
    return ids


def beginning(tokenizer: Tokenizer, text: str, most: int) -> str | None:
    """The beginning of a text that alone has more than `most` tokens, whatever follows; None when there is none.

    It is counted in pieces of bounded size, as many as it takes to be sure.
    """
    count = at = 0
    piece = min(PIECE, max(_LEAST_PIECE, BYTES_PER_TOKEN * most))
    while at < len(text):
        end = _cut(text, at + piece)
        count += len(tokenizer.encode_batch_fast([text[at:end]], add_special_tokens=False)[0]) - CUT_TOKENS
        if count > most:
            return text[:end]
        at = end
    return None


def ending(tokenizer: Tokenizer, text: str, last: int) -> str:
    """The end of a text that has its last `last` tokens, and some before them: a cut changes tokens next to it only.

    It is counted in pieces of bounded size, from the end.
    """
    count, end = 0, len(text)
    piece = min(PIECE, max(_LEAST_PIECE, BYTES_PER_TOKEN * last))
    while end > 0 and count <= last:
        start = max(_cut(text, end - piece), 0) if end > piece else 0
        if start >= end:
            start = max(end - piece, 0)
        count += len(tokenizer.encode_batch_fast([text[start:end]], add_special_tokens=False)[0]) - CUT_TOKENS
        end = start
    return text[end:]


def _cut(text: str, at: int) -> int:
    """A place to cut near `at`, between a word and the space after it if there is one: tokens do not cross it."""
    if at >= len(text):
        return len(text)
    gap = _GAP.search(text, at, at + _GAP_WITHIN)
    return at if gap is None else gap.start() + 1


def utf8_size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def most_bytes_per_token(tokenizer: Tokenizer) -> int | None:
    """The most bytes of a text that become one token: a longer text than that times the window cannot fit.

    None where there is no such number, because the tokenizer drops or joins some text without a bound. Control
    characters do not count: vocabularies lack some of them (that of smollm2 lacks six), and text that would fit only
    because most of it is dropped is of no use.
    """
    model = tokenizer.model
    shrinks = _shrinks(tokenizer.normalizer)
    if not isinstance(model, BPE) or shrinks is None or not _keeps_all(_state(tokenizer.pre_tokenizer)):
        return None
    byte_level = "ByteLevel" in str(_state(tokenizer.pre_tokenizer)) or "ByteLevel" in str(_state(tokenizer.normalizer))
    spellings = tokenizer.get_vocab(with_added_tokens=False)
    covers_all = model.byte_fallback or (model.unk_token is not None and not model.fuse_unk)
    covers_all = covers_all or (byte_level and spellings.keys() >= _LETTERS)
    added = tokenizer.get_added_tokens_decoder().values()
    if not covers_all or any(token.lstrip or token.rstrip for token in added):
        return None
    longest = max((len(word) if byte_level else len(word.encode()) for word in spellings), default=4)
    return max(longest, 4, *(len(token.content.encode()) for token in added)) * shrinks


def _state(part: Any) -> dict[str, Any]:
    """A part of a tokenizer as its file describes it."""
    if part is None:
        return {}
    described: dict[str, Any] = json.loads(part.__getstate__())
    return described


def _keeps_all(state: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer passes on every character."""
    kind = state.get("type")
    if kind == "Sequence":
        return all(map(_keeps_all, state["pretokenizers"]))
    return kind is None or kind in _KEEPS_ALL or (kind == "Split" and state["behavior"] != "Removed")


def _shrinks(normalizer: Any) -> int | None:
    """By which factor a normalizer may shorten a text; None: by any."""
    factor = 1
    state = _state(normalizer)
    for step in state["normalizers"] if state.get("type") == "Sequence" else [state]:
        kind = step.get("type")
        if kind == "NFC":
            factor *= _NFC_SHRINKS
        elif kind == "Replace":
            pattern = step["pattern"].get("String")
            if not pattern or len(step["content"].encode()) < len(pattern.encode()):
                return None
        elif kind not in (None, "Prepend", "NFD", "ByteLevel"):
            return None
    return factor
