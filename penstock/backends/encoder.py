"""The client of an encoder engine: each request is a list of texts with one reply.

Connection, readiness and loss are handled as for every engine; only requests and replies differ. Invariant: every
request ends with its encoding or one error, even when the engine dies; cancelling a request aborts it in the engine.
"""

from __future__ import annotations

import asyncio

from penstock.backends.errors import error_of
from penstock.backends.native import NativeBackend
from penstock.engine.encoder.request import EncodeRequest, Encoding
from penstock.engine.request import StepOutput
from penstock.protocol.errors import ApiError, EngineUnavailable, Overloaded
from penstock.protocol.messages import Encode, Encoded, FromEngine


class EncoderBackend(NativeBackend):
    """Client of one encoder engine."""

    _answers: dict[str, asyncio.Future[Encoding]]

    async def start(self) -> None:
        self._answers = {}
        await super().start()

    async def encode(self, request: EncodeRequest) -> Encoding:
        if not self.ready:
            raise EngineUnavailable("The engine for this encoder is restarting; try again.")
        if len(self._answers) >= self._max_in_flight:
            raise Overloaded(f"{len(self._answers)} requests to this encoder are already waiting; try again shortly.")
        answer: asyncio.Future[Encoding] = asyncio.get_running_loop().create_future()
        self._answers[request.request_id] = answer
        try:
            if not self._try_send(Encode(request)):
                raise Overloaded("The encoder accepts no new requests at the moment; try again shortly.")
            return await answer
        except asyncio.CancelledError:
            self._send_abort(request.request_id)
            raise
        finally:
            del self._answers[request.request_id]

    @property
    def in_flight(self) -> int:
        return len(self._answers)

    def _on_message(self, message: FromEngine) -> None:
        if isinstance(message, Encoded):
            super()._deliver(StepOutput([], message.load))
            for encoding in message.encodings:
                answer = self._answers.get(encoding.request_id)
                if answer is not None and not answer.done():
                    answer.set_result(encoding)
        else:
            super()._on_message(message)

    def _deliver(self, output: StepOutput) -> None:
        super()._deliver(output)
        for delta in output.deltas:
            answer = self._answers.get(delta.request_id)
            if answer is not None and not answer.done():
                answer.set_exception(error_of(delta))

    def _went_down(self, error: ApiError) -> None:
        super()._went_down(error)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)
