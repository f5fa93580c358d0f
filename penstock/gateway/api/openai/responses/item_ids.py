"""Ids of items. Those of a response contain its id, so that an item that a client refers to is found without an index;
an id that the client gave an item itself is kept."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

_OURS = re.compile(r"[a-z]+_([0-9a-f]{32})i?[0-9a-f]{4}")
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "local_shell_call": "lsh",
    "compaction": "cmp",
    "file_search_call": "fs",
}


def output_id(prefix: str, generation: str, index: int) -> str:
    """The same when a stream is resumed."""
    return f"{prefix}_{generation}{index:04x}"


def response_of(item: str) -> str | None:
    """The response that an item belongs to; None where the id is not one of ours."""
    found = _OURS.fullmatch(item)
    return None if found is None else f"resp_{found[1]}"


def input_items(response: str, given: str | Sequence[msgspec.Raw]) -> list[dict[str, Any]]:
    """What the client sent, as the API shows it: with ids, and content as a list of parts."""
    items: list[dict[str, Any]]
    if isinstance(given, str):
        items = [{"type": "message", "role": "user", "content": given}]
    else:
        items = [msgspec.json.decode(raw) for raw in given]
    return [shown(item, f"{response.removeprefix('resp_')}i{index:04x}") for index, item in enumerate(items)]


def shown(item: dict[str, Any], mark: str) -> dict[str, Any]:
    """`mark`: what makes the id unique, where the item has none."""
    kind = item.get("type") or "message"
    item = {**item, "type": kind, "id": item.get("id") or f"{_PREFIXES.get(kind, 'item')}_{mark}"}
    if kind == "message" and isinstance(item.get("content"), str):
        part: dict[str, Any] = {"type": "input_text", "text": item["content"]}
        if item.get("role") == "assistant":
            part = {"type": "output_text", "text": item["content"], "annotations": [], "logprobs": []}
        item["content"] = [part]
    if item.get("status") is None and kind in ("message", "function_call", "function_call_output"):
        item["status"] = "completed"
    return item
