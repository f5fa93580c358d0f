"""The lines of a batch's files: how requests are validated and answers are written.

All lines are checked before the first one runs, so that a batch with mistakes costs nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
"""Where the requests of a file may go; batches of messages are made otherwise (`message_batches.py`)."""
MOST_PROBLEMS = 100
CUSTOM_ID = 256
"""The most characters of a `custom_id`."""


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request of a batch."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class Problem(msgspec.Struct, frozen=True):
    """A problem of an input file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class _Streamed(msgspec.Struct):
    stream: Any = None


_line = msgspec.json.Decoder(Line)
_streamed = msgspec.json.Decoder(_Streamed)


def read(text: str) -> Line:
    """Decode a line that was checked before."""
    return _line.decode(text)


def numbered(part: str, first: int) -> Iterator[tuple[int, str]]:
    """The non-empty lines of a part with their numbers in the file; `first` is the number of its first line."""
    for number, text in enumerate(part.split("\n"), start=first):
        if number == 1:
            text = text.removeprefix("\ufeff")
        if text.strip():
            yield number, text


class Check:
    """Checks the lines of a file in order; `problems` has the first `MOST_PROBLEMS` problems."""

    def __init__(self, endpoint: str, most: int) -> None:
        self._endpoint = endpoint
        self._most = most
        self._seen: set[str] = set()
        self.count = 0
        self.problems: list[Problem] = []

    def add(self, lines: Iterable[tuple[int, str]]) -> None:
        for number, text in lines:
            self.count += 1
            if len(self.problems) < MOST_PROBLEMS and (problem := self._problem(number, text)) is not None:
                self.problems.append(problem)

    def finish(self) -> list[Problem]:
        if not self.count:
            self.problems.append(Problem("empty_file", "The input file has no requests."))
        elif self.count > self._most:
            self.problems.append(
                Problem(
                    "too_many_requests", f"The input file has {self.count} requests; a batch has at most {self._most}."
                )
            )
        return self.problems

    def _problem(self, number: int, text: str) -> Problem | None:
        try:
            line = _line.decode(text)
            streamed = _streamed.decode(line.body).stream
        except (msgspec.DecodeError, RecursionError) as error:
            code = "invalid_line" if isinstance(error, msgspec.ValidationError) else "invalid_json_line"
            return Problem(code, f"This line is not a request: {error}.", number)
        if not line.custom_id or len(line.custom_id) > CUSTOM_ID:
            return Problem("invalid_custom_id", f"`custom_id` has 1 to {CUSTOM_ID} characters.", number, "custom_id")
        if line.custom_id in self._seen:
            return Problem("duplicate_custom_id", "Another line has the same `custom_id`.", number, "custom_id")
        self._seen.add(line.custom_id)
        if line.method != "POST":
            return Problem("invalid_method", "`method` must be `POST`.", number, "method")
        if line.url != self._endpoint:
            return Problem(
                "mismatched_endpoint", f"`url` must be the batch's endpoint, `{self._endpoint}`.", number, "url"
            )
        if streamed:
            return Problem("invalid_value", "A request of a batch cannot be streamed.", number, "body.stream")
        return None


def answered(custom_id: str, status: int, request_id: str, body: bytes, ignored: str | None = None) -> str:
    """A line of the output file, or of the error file when the request was refused. `ignored`: parameters that were."""
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    if ignored is not None:
        response["ignored_parameters"] = ignored
    return _written(custom_id, response, None)


def unanswered(custom_id: str, code: str, message: str) -> str:
    """A line of the error file for a request that was not completed."""
    return _written(custom_id, None, {"code": code, "message": message})


def _written(custom_id: str, response: dict[str, Any] | None, error: dict[str, str] | None) -> str:
    line = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(line).decode() + "\n"
