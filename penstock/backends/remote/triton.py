"""Triton's generate extension with the TensorRT-LLM backend: a prompt in, pieces of text out.

It knows neither messages nor usage nor finish reasons. An answer of as many events as tokens were allowed counts as cut
off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar
from urllib.parse import quote

from penstock.backends.remote.chunk import Chunk, ChunkChoice, ChunkDelta, end_chunk
from penstock.backends.remote.conversation import limit_of, prompt_of, stops_of
from penstock.backends.remote.dialect import Call, Dialect, Reader, encode, json_object
from penstock.backends.remote.failure import failed_stream, garbage
from penstock.backends.remote.features import Feature, Operation
from penstock.backends.remote.frames import Event
from penstock.text.stop_strings import StopStrings

INPUTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "random_seed",
    "min_tokens": "min_length",
    "bad_words": "bad_words",
}


class TritonReader(Reader):
    """Events with a piece of text each."""

    def __init__(self, stops: list[str], limit: int) -> None:
        super().__init__()
        self._stops = StopStrings(stops)
        self._left = limit

    def read(self, event: Event) -> Iterator[Chunk]:
        sent = json_object(event.data)
        if sent.get("error"):
            raise failed_stream("", str(sent["error"]))
        text = sent.get("text_output")
        if not isinstance(text, str):
            raise garbage()
        self._left -= 1
        shown = self._stops.push(text)[0]
        if shown:
            yield Chunk([ChunkChoice(0, ChunkDelta(shown))])

    def end(self) -> Iterator[Chunk]:
        yield from super().end()
        held = self._stops.flush()
        if held:
            yield Chunk([ChunkChoice(0, ChunkDelta(held))])
        yield end_chunk("length" if self._left <= 0 else "stop")


class Triton(Dialect):
    name = "triton"
    features: ClassVar[frozenset[Feature]] = frozenset(("completions", "seed"))
    parameters: ClassVar[frozenset[str] | None] = frozenset(INPUTS)

    def call(self, operation: Operation, body: Mapping[str, Any]) -> Call:
        if operation == "chat":
            raise self._missing("chat")
        sent = {there: body[here] for here, there in INPUTS.items() if body.get(here) is not None}
        sent |= {"text_input": prompt_of(body), "max_tokens": self._limit(body), "stream": True}
        if sent.get("top_k", 1) <= 0:
            del sent["top_k"]
        stops = stops_of(body)
        if stops:
            sent["stop_words"] = stops
        return Call(f"{self._model}/generate_stream", encode(sent), {"accept": "text/event-stream"})

    def reader(self, operation: Operation, body: Mapping[str, Any]) -> Reader:
        return TritonReader(stops_of(body), self._limit(body))

    def health_call(self) -> Call:
        return Call(f"{self._model}/ready")

    def healthy(self, status: int, data: bytes) -> bool:
        return status == 200

    def _limit(self, body: Mapping[str, Any]) -> int:
        return limit_of(body) or self.upstream.max_tokens

    @property
    def _model(self) -> str:
        return f"{self.upstream.root.removesuffix('/v2')}/v2/models/{quote(self.upstream.model, safe='')}"
