"""Files among the input of a response. Stored with the response are the items as they were sent; the model reads what
the files say, and the stored conversation keeps that, so that it does not depend on files that may be deleted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct

from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.input_files import FileReading, InputFiles
from penstock.gateway.generation.request_decoder import RequestDecoder, ignore_advice
from penstock.protocol.errors import InvalidRequest

_MARK = b"input_file"
_PLACES = ("content", "output")
"""Where items have parts: messages, and what tools returned."""


class InputFile(Struct, forbid_unknown_fields=True, kw_only=True):
    """A file among the parts of a message, or of what a tool returned."""

    type: Literal["input_file"]
    file_id: str | None = None
    file_data: str | None = None
    file_url: str | None = None
    filename: str | None = None
    detail: Literal["auto", "low", "high"] | None = None


_file = RequestDecoder(InputFile)


async def with_file_texts(
    exchange: Exchange, files: InputFiles, given: str | Sequence[Raw], model: str | None, *, free: bool = False
) -> str | Sequence[Raw]:
    """The input with the texts of its files in their place; `model` and `free`: see `InputFiles.reading`."""
    if isinstance(given, str) or not any(_MARK in bytes(raw) for raw in given):
        return given
    read = list(given)
    async with files.reading(exchange, model, free=free) as reading:
        for index, raw in enumerate(given):
            if _MARK not in bytes(raw):
                continue
            item = msgspec.json.decode(raw)
            if isinstance(item, dict) and await _read_item(exchange, reading, item, f"input[{index}]"):
                read[index] = Raw(msgspec.json.encode(item))
    return read


async def _read_item(exchange: Exchange, reading: FileReading, item: dict[str, Any], at: str) -> bool:
    """Whether the item had files."""
    found = False
    for place in _PLACES:
        parts = item.get(place)
        if not isinstance(parts, list):
            continue
        for number, part in enumerate(parts):
            if not isinstance(part, dict) or part.get("type") != "input_file":
                continue
            here = f"{at}.{place}[{number}]"
            if item.get("role") == "assistant":
                raise InvalidRequest("The assistant sends no files.", param=f"{here}.type")
            file = _file(exchange, msgspec.json.encode(part), here)
            if file.detail not in (None, "auto"):
                ignore_advice(exchange, "input.detail")
            text = await reading.one(here, id=file.file_id, data=file.file_data, url=file.file_url, name=file.filename)
            parts[number] = {"type": "input_text", "text": text.part()}
            found = True
    return found
