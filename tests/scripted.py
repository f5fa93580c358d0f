"""A scripted engine (the interface of the real one, no model) and a tiny real tokenizer, for tests of the layers
around the engine. Each token takes one step, as in the real engine.

An engine that takes time for its steps never runs ahead of the event loop that it was made in: a test that wants to act
in the middle of an answer does so, also on a machine that is too busy to let it run for a while.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from penstock.engine.request import Delta, EngineInfo, EngineLoad, Request, StepOutput, TokenLogprob
from penstock.text import TextModel, load_text
from penstock.text.byte_tokenizer import write_tokenizer


def make_text(folder: Path, *, chat: bool = True, context_length: int = 512) -> TextModel:
    """A byte-level tokenizer: every byte is a token, and there are four control tokens."""
    write_tokenizer(folder, chat=chat, context_length=context_length)
    return load_text(folder)


class ScriptedEngine:
    """Answers every request with `script(request)`, one token per step, then stops (or runs out of tokens)."""

    def __init__(
        self,
        text: TextModel,
        script: Callable[[Request], list[int]] | str = "Hello, world!",
        *,
        step_s: float = 0.0,
        max_model_len: int = 512,
        num_blocks: int = 64,
    ) -> None:
        eos = text.eos_token_ids[0]
        if isinstance(script, str):
            answer = [*text.encode(script), eos]
            self.script: Callable[[Request], list[int]] = lambda request: list(answer)
        else:
            self.script = script
        self.step_s = step_s
        self.decode_s = 0.0
        """What it reports as the time of a step without prompts."""
        self.hold = False
        """While set, no request makes progress (a long prefill)."""
        self.info = EngineInfo(
            model="scripted",
            instance=uuid.uuid4().hex,
            max_model_len=max_model_len,
            vocab_size=text.vocab_size,
            block_size=16,
            num_blocks=num_blocks,
            max_running=64,
            device="none",
            dtype="none",
        )
        self.seen: list[Request] = []
        self.aborted: list[str] = []
        self._left: dict[str, tuple[Request, list[int]]] = {}
        self._first: set[str] = set()
        self._began: dict[str, float] = {}
        self._deltas: list[Delta] = []
        self._counts: dict[str, int] = {}
        self._steps = self._generated = self._prompt_tokens = 0
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None

    def submit(self, request: Request) -> None:
        self.seen.append(request)
        self._first.add(request.request_id)
        self._prompt_tokens += len(request.prompt)
        done = len(request.produced)  # by another engine, before it died
        self._counts[request.request_id] = done
        self._left[request.request_id] = (request, self.script(request)[done:])

    adapters = None

    def unload_adapter(self, name: str) -> None:
        raise AssertionError("there are no adapters")

    def abort(self, request_id: str) -> None:
        if self._left.pop(request_id, None) is not None:
            self.aborted.append(request_id)
            self._deltas.append(Delta(request_id, finish_reason="abort"))

    @property
    def has_work(self) -> bool:
        return bool(self._left or self._deltas)

    def step(self) -> StepOutput | None:
        if self._left:
            time.sleep(self.step_s or (0.001 if self.hold else 0.0))
            if self.step_s:
                self._await_loop()
        if not self.hold:
            for id in list(self._left):
                self._advance(id)
        self._steps += 1
        deltas, self._deltas = self._deltas, []
        return StepOutput(deltas, self.load_snapshot()) if deltas else None

    def _await_loop(self, turns: int = 3) -> None:
        """Until the loop has had some turns. It may be over, or wait for this engine's end."""
        done = threading.Event()

        def turn(left: int) -> None:
            if left and self._loop is not None:
                self._loop.call_soon(turn, left - 1)
            else:
                done.set()

        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(turn, turns)
            except RuntimeError:
                self._loop = None
            else:
                done.wait(1.0)

    def load_snapshot(self) -> EngineLoad:
        return EngineLoad(
            running=len(self._left),
            used_blocks=len(self._left),
            total_blocks=self.info.num_blocks,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generated,
            decode_s=self.decode_s,
        )

    def _advance(self, id: str) -> None:
        request, left = self._left[id]
        delta = Delta(id)
        if left:
            token = left.pop(0)
            delta.tokens = [token]
            self._generated += 1
            done = self._counts.get(id, 0)
            if request.params.logprobs is not None:
                delta.logprobs = [_logprob(token, request.params.logprobs)]
            if token in request.params.stop_token_ids:
                delta.finish_reason = "stop"
            elif done + 1 >= request.params.max_tokens:
                delta.finish_reason = "length"
            self._counts[id] = done + 1
        else:
            delta.finish_reason = "length"
        if id in self._first:
            self._first.discard(id)
            delta.cached_tokens, delta.queue_s, delta.prefill_s = 3, 0.001, 0.002
            self._began[id] = time.monotonic()
            if request.params.prompt_logprobs is not None:
                k = request.params.prompt_logprobs
                delta.prompt_logprobs = [None, *(_logprob(token, k) for token in request.prompt[1:])]
        if delta.finish_reason is not None:
            del self._left[id]
            delta.decode_s = time.monotonic() - self._began.pop(id)
        self._deltas.append(delta)


def _logprob(token: int, k: int) -> TokenLogprob:
    return TokenLogprob(-0.5, [token, 1, 2, 3, 4][:k], [-0.5, -1.0, -2.0, -3.0, float("-inf")][:k])
