"""Documents that are files: their text takes their place before messages are read (`history.py`). A file that cannot be
read is refused where the user hands it in; where a tool did, `history.py` leaves a note."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.gateway.api.anthropic.blocks import DocumentBlock, Message, ToolResultBlock
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.input_files import FileReading, InputFiles, UnreadableFile

_FILES = ("file", "base64", "url")
"""Sources that have to be read; others are text."""


async def read_documents(
    exchange: Exchange, files: InputFiles, messages: Sequence[Message], model: str, *, free: bool = False
) -> None:
    """Replaces the sources of documents that are files by their text; `free`: see `InputFiles.reading`."""
    every = list(_documents(messages))
    exchange.documents = bool(every)
    documents = [found for found in every if found[0].source.get("type") in _FILES]
    if not documents:
        return
    async with files.reading(exchange, model, free=free) as reading:
        for block, at, of_a_tool in documents:
            try:
                await _read(reading, block, at)
            except UnreadableFile:
                if not of_a_tool:
                    raise


async def _read(reading: FileReading, block: DocumentBlock, at: str) -> None:
    source = block.source
    if isinstance(id := source.get("file_id"), str) and source["type"] == "file":
        found = await reading.stored(id, f"{at}.source.file_id")
        block.title = block.title or found.name
    elif isinstance(url := source.get("url"), str) and source["type"] == "url":
        found = await reading.fetched(url, f"{at}.source.url", block.title)
        block.title = block.title or found.name
    elif isinstance(data := source.get("data"), str) and data:
        media_type = source.get("media_type")
        found = await reading.sent(
            data, f"{at}.source.data", block.title, media_type if isinstance(media_type, str) else ""
        )
    else:
        return
    block.source = {"type": "text", "data": found.text}


def _documents(messages: Sequence[Message]) -> Iterator[tuple[DocumentBlock, str, bool]]:
    """Documents, where they are, and whether a tool returned them."""
    for index, message in enumerate(messages):
        for place, block in enumerate(() if isinstance(message.content, str) else message.content):
            at = f"messages[{index}].content[{place}]"
            if isinstance(block, DocumentBlock):
                yield block, at, False
            elif isinstance(block, ToolResultBlock) and isinstance(block.content, list):
                for number, inner in enumerate(block.content):
                    if isinstance(inner, DocumentBlock):
                        yield inner, f"{at}.content[{number}]", True
