"""A stored response as the events of a stream, for a client that reads it again (`?stream=true`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.gateway.api.openai.responses.output_calls import Event
from penstock.gateway.app.exchange import encode_json


def replayed(response: dict[str, Any], after: int = -1) -> bytes:
    """The events with a sequence number greater than `after`."""
    numbered = enumerate(_events(response))
    return b"".join(encode_event(event, number) for number, event in numbered if number > after)


def encode_event(event: Event, number: int) -> bytes:
    name, fields = event
    data = encode_json({"type": name, "sequence_number": number, **fields})
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def _events(response: dict[str, Any]) -> Iterator[Event]:
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "completed_at": None}
    begun["incomplete_details"] = begun["error"] = None
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(response["output"]):
        yield "response.output_item.added", {"output_index": index, "item": _empty(item)}
        place = {"item_id": item["id"], "output_index": index}
        if item["type"] == "message":
            for number, part in enumerate(item["content"]):
                yield from _part({**place, "content_index": number}, part)
        elif item["type"] == "function_call":
            yield "response.function_call_arguments.delta", {**place, "delta": item["arguments"]}
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", {**place, **done}
        elif item["type"] == "custom_tool_call":
            yield "response.custom_tool_call_input.delta", {**place, "delta": item["input"]}
            yield "response.custom_tool_call_input.done", {**place, "input": item["input"]}
        elif item["type"] == "file_search_call":
            for state in ("in_progress", "searching", "completed"):
                yield f"response.file_search_call.{state}", place
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{response['status']}", {"response": response}


def _part(place: dict[str, Any], part: dict[str, Any]) -> Iterator[Event]:
    text, logprobs = part["text"], part["logprobs"]
    yield "response.content_part.added", {**place, "part": {**part, "text": "", "annotations": [], "logprobs": []}}
    yield "response.output_text.delta", {**place, "delta": text, "logprobs": logprobs}
    for number, annotation in enumerate(part["annotations"]):
        told = {**place, "annotation_index": number, "annotation": annotation}
        yield "response.output_text.annotation.added", told
    yield "response.output_text.done", {**place, "text": text, "logprobs": logprobs}
    yield "response.content_part.done", {**place, "part": part}


def _empty(item: dict[str, Any]) -> dict[str, Any]:
    """An item as it is when it begins."""
    empty: dict[str, dict[str, Any]] = {
        "message": {"content": []},
        "function_call": {"arguments": ""},
        "custom_tool_call": {"input": ""},
        "file_search_call": {"results": None},
    }
    return {**item, **empty.get(item["type"], {}), "status": "in_progress"}
