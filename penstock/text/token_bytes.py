"""The bytes of each token.

A tokenizer's decoder is reduced to a rule per token: byte-level BPE writes every byte as one printable character;
SentencePiece writes spaces as `▁` and single bytes as `<0xNN>`. With the bytes of a token known, text of any
sequence is their concatenation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from penstock.errors import CheckpointError

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 bytes are themselves, the others count up from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


BYTE_OF_LETTER = _byte_of_character()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([BYTE_OF_LETTER[character] for character in token])
    except KeyError:
        return token.encode()  # an added token in plain text


def _sentencepiece(token: str) -> bytes:
    match = _BYTE.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()


def decoding_rule(decoder: Any) -> tuple[Callable[[str], bytes], bool]:
    """From a `tokenizers` decoder: the bytes of a token, and whether the text's first space is stripped."""
    state = json.loads(decoder.__getstate__()) if decoder is not None else {"type": None}
    steps = state.get("decoders", [state])
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds:
        return _byte_level, False
    if kinds == ["Metaspace"]:
        return _sentencepiece, state.get("prepend_scheme", "always") != "never"
    if "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        strips = any(step.get("type") == "Strip" and step.get("start", 0) > 0 for step in steps)
        return _sentencepiece, strips
    raise CheckpointError(
        f"the tokenizer decodes with {kinds}, which is not supported; supported: byte-level and SentencePiece BPE"
    )
