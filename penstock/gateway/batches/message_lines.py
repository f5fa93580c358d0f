"""The lines of a batch of messages: requests as the runner reads them, results as the Messages API has them."""

from __future__ import annotations

from typing import Any

import msgspec

MESSAGES = "/v1/messages"
"""The endpoint of the requests of such a batch."""
_WRITTEN_OFF = {"batch_cancelled": "canceled", "batch_expired": "expired"}


def message_line(custom_id: str, params: msgspec.Raw) -> str:
    """A request, as a line of an input file."""
    line = {"custom_id": custom_id, "method": "POST", "url": MESSAGES, "body": params}
    return msgspec.json.encode(line).decode().replace("\n", " ") + "\n"  # outside of strings, newlines are blanks


def message_answered(custom_id: str, status: int, request_id: str, body: bytes, ignored: str | None = None) -> str:
    """The result of a request that was answered or refused. `ignored`: parameters that were."""
    answer = msgspec.Raw(body)
    if status == 200:
        return _written(custom_id, {"type": "succeeded", "message": answer}, ignored)
    return _written(custom_id, {"type": "errored", "error": answer}, ignored)


def message_unanswered(custom_id: str, code: str, message: str) -> str:
    """The result of a request that was not completed."""
    return _written(custom_id, {"type": _WRITTEN_OFF[code]})


def _written(custom_id: str, result: dict[str, Any], ignored: str | None = None) -> str:
    line: dict[str, Any] = {"custom_id": custom_id, "result": result}
    if ignored is not None:
        line["ignored_parameters"] = ignored
    return msgspec.json.encode(line).decode() + "\n"
