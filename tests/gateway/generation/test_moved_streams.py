"""An engine dies between any two frames: the client hears and pays for exactly what an undisturbed run gives (R-RT-7).

Engines whose every frame and death the test decides, behind the real replica set, mailbox and detokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.backends.base import EngineClient, monotonic
from penstock.engine.request import Delta, EngineInfo, EngineLoad, Request, SamplingParams, StepOutput, TokenLogprob
from penstock.gateway.generation.engine import EngineGeneration
from penstock.gateway.generation.spec import GenerationSpec, TokenPrompt
from penstock.protocol.errors import EngineLost
from penstock.protocol.messages import AdapterOperation, Sleep, Wake
from penstock.routing.dispatch import Resilience
from penstock.routing.registry import ServedModel
from penstock.routing.replicas import ReplicaSet
from penstock.telemetry.metrics import Metrics
from penstock.text import TextModel

ANSWER = "Hello, wörld! 日本語🎉. And more."
KINDS: dict[str, dict[str, Any]] = {
    "to the end": {},
    "to its limit": {"max_tokens": 17},
    "stop string": {"stops": ["本語"]},
    "stop string of several tokens": {"stops": ["rld! "]},
    "held for a stop string that never comes": {"stops": ["more.?"]},
    "stop string not before min_tokens": {"stops": ["l"], "min_tokens": 6},
    "logprobs": {"logprobs": 0, "stops": ["And"]},
    "two choices": {"n": 2, "stops": [". A"]},
}
METRICS = Metrics(lambda: ())
"""Of all runs, of which there are thousands: nothing here reads them."""


class Puppet(EngineClient):
    """One token of the answer per request and frame; several as one, if the engine guesses ahead."""

    def __init__(self, name: str, answer: list[int], at_once: int) -> None:
        super().__init__(name, max_in_flight=100, max_waiters=10, clock=monotonic)
        self._answer = answer
        self._at_once = at_once
        self._running: dict[str, tuple[Request, int]] = {}

    async def start(self) -> None:
        self.come()

    async def close(self) -> None:
        self.die()

    def come(self) -> None:
        self._came_up(EngineInfo("puppet", self.name, 512, 300, 16, 64, 8, "none", "none"))

    def die(self) -> None:
        self._running.clear()
        self._went_down(EngineLost())

    def frame(self) -> None:
        deltas = []
        for id, (request, done) in list(self._running.items()):
            end = min(done + self._at_once, len(self._answer), request.params.max_tokens)
            delta = Delta(id, self._answer[done:end], cached_tokens=0)
            if request.params.logprobs is not None:
                delta.logprobs = [TokenLogprob(-float(at)) for at in range(done, end)]
            if end == len(self._answer):
                delta.finish_reason = "stop"
            elif end == request.params.max_tokens:
                delta.finish_reason = "length"
            self._running[id] = (request, end)
            if delta.finish_reason is not None:
                del self._running[id]
            deltas.append(delta)
        if deltas:
            self._deliver(StepOutput(deltas, EngineLoad(running=len(self._running))))

    def _send_submit(self, request: Request) -> None:
        self._running[request.request_id] = (request, len(request.produced))

    def _send_abort(self, request_id: str, resumable: bool = False) -> None:
        if self._running.pop(request_id, None) is not None:
            self._deliver(StepOutput([Delta(request_id, finish_reason="abort")], EngineLoad()))

    def _send_state(self, message: Sleep | Wake) -> None:
        raise NotImplementedError

    def _send_operation(self, operation: AdapterOperation) -> None:
        raise NotImplementedError


@dataclass
class Heard:
    texts: dict[int, str] = field(default_factory=dict)
    ends: dict[int, tuple[str, str | int | None]] = field(default_factory=dict)
    logprobs: list[tuple[int, float]] = field(default_factory=list)
    usage: dict[str, object] = field(default_factory=dict)


async def hear(
    text: TextModel, kind: dict[str, Any], engines: int, kill_after: int | None, read_every: int, at_once: int = 1
) -> Heard:
    """Run an answer to its end. `read_every`: the reader comes once in so many frames."""
    answer = [*text.encode(ANSWER), text.eos_token_ids[0]]
    puppets = [Puppet(str(index), answer, at_once) for index in range(engines)]
    replicas = ReplicaSet("tiny", puppets, resilience=Resilience(park_s=5.0))
    await replicas.start()
    params = SamplingParams(
        max_tokens=kind.get("max_tokens", 100), min_tokens=kind.get("min_tokens", 0), logprobs=kind.get("logprobs")
    )
    spec = GenerationSpec(
        id="answer",
        model=ServedModel("tiny", text, replicas),
        prompts=[TokenPrompt([1, 2, 3], [params] * kind.get("n", 1))],
        started_at=monotonic(),
        stops=kind.get("stops", []),
        logprobs="logprobs" in kind,
    )
    generation = EngineGeneration(spec, METRICS)
    heard = Heard()
    generation.submit()
    for number in range(1, 200):
        if number - 1 == kill_after:
            for victim in [puppet for puppet in puppets if puppet.in_flight][:1]:
                victim.die()
                if engines == 1:
                    victim.come()
                    for flight in list(replicas.dispatcher._parked.values()):
                        replicas.dispatcher._offer(flight)
        for puppet in puppets:
            puppet.frame()
        if number % read_every == 0:
            for piece in await generation.next(0.0):
                heard.texts[piece.index] = heard.texts.get(piece.index, "") + piece.text
                heard.logprobs += [(token.id, token.logprob.logprob) for token in piece.tokens]
                if piece.finish_reason is not None:
                    heard.ends[piece.index] = (piece.finish_reason, piece.stop_reason)
        if generation.done:
            break
    heard.usage = generation.usage()
    generation.close()
    await replicas.close()
    return heard


def moments() -> Iterator[Any]:
    for name, kind in KINDS.items():
        for engines in (1, 2):
            yield pytest.param(kind, engines, id=f"{name}, {engines} replica{'s' if engines > 1 else ''}")


@pytest.mark.parametrize(("kind", "engines"), list(moments()))
async def test_wherever_an_engine_dies_the_answer_and_its_price_are_the_same(
    text: TextModel, kind: dict[str, Any], engines: int
) -> None:
    calm = await hear(text, kind, engines, None, 1)
    assert len(calm.ends) == kind.get("n", 1)
    for kill_after in range(len(text.encode(ANSWER)) + 2):
        for read_every, at_once in ((1, 1), (3, 1), (100, 1), (2, 3)):
            assert await hear(text, kind, engines, kill_after, read_every, at_once) == calm, (kill_after, read_every)
