"""An engine without a model behind the real protocol, for gateway benchmarks and tests.

It writes a text that both sides can compute, so that a reader can prove that nothing was lost, repeated or mixed up:
stream `n` (the request's `seed`) is `text_of(n, ...)`. `top_k` tokens come per step (one when it is 0), a step takes
`interval_s`. Its tokenizer has one token per byte and four control tokens.

    python -m penstock.testing.synthetic_engine ipc:///tmp/engine FOLDER --interval 1.0
"""

from __future__ import annotations

import argparse
import itertools
import random
import string
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from penstock.engine.process import die_with_parent
from penstock.engine.request import Delta, EngineInfo, EngineLoad, Request, StepOutput
from penstock.engine_host.pacer import Pacing
from penstock.engine_host.server import EngineServer
from penstock.protocol.transport import Listener
from penstock.text.byte_tokenizer import write_tokenizer

NAP_S = 0.005
"""The longest sleep between two checks of the socket."""
_LETTERS = "".join(random.Random(7).choices(string.ascii_letters + string.digits, k=1 << 16))
_STRIDE = 131
"""Neighbouring streams read the same letters, this far apart."""


def text_of(stream: int, start: int, count: int) -> str:
    """The text of tokens `start` to `start + count` of a stream."""
    begin = (stream * _STRIDE + start) % len(_LETTERS)
    text = _LETTERS[begin : begin + count]
    while len(text) < count:
        text += _LETTERS[: count - len(text)]
    return text


@dataclass(slots=True)
class _Running:
    stream: int
    left: int
    per_step: int
    done: int = 0


class SyntheticEngine:
    """The engine interface of `EngineServer`. With an interval of 0 a request is answered in its first step."""

    adapters = None

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        interval_s: float = 0.0,
        max_model_len: int = 1 << 20,
        max_running: int = 1 << 20,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.info = EngineInfo(
            model="synthetic",
            instance=uuid.uuid4().hex,
            max_model_len=max_model_len,
            vocab_size=tokenizer.get_vocab_size(),
            block_size=16,
            num_blocks=1 << 20,
            max_running=max_running,
            device="none",
            dtype="none",
        )
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self._ids = {letter: vocabulary[letter] for letter in string.ascii_letters + string.digits}
        self._interval_s = interval_s
        self._clock = clock
        self._sleep = sleep
        self._due = clock()
        self._running: dict[str, _Running] = {}
        self.on_begun: Callable[[list[str]], None] = lambda request_ids: None
        self._hurried: dict[str, None] = {}
        """Requests with a `patience_s` that have not begun."""
        self._steps = self._generated = 0

    def submit(self, request: Request) -> None:
        params = request.params
        per_step = params.top_k or (1 if self._interval_s else params.max_tokens)
        done = len(request.produced)  # by another engine
        self._running[request.request_id] = _Running(params.seed, params.max_tokens - done, per_step, done)
        if request.patience_s is not None:
            self._hurried[request.request_id] = None

    def abort(self, request_id: str) -> None:
        self._running.pop(request_id, None)
        self._hurried.pop(request_id, None)

    def unload_adapter(self, name: str) -> None:
        raise KeyError(f"there is no adapter {name}")

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def step(self) -> StepOutput | None:
        """One token (or `top_k`) for every request when the step is due; a short sleep otherwise."""
        if self._hurried:
            self._begin()
        wait = self._due - self._clock()
        if wait > 0:
            self._sleep(min(wait, NAP_S))
            return None
        # A late step is not made up for: a real engine does not catch up either.
        self._due = max(self._due + self._interval_s, self._clock())
        self._steps += 1
        batch = itertools.islice(self._running.items(), self.info.max_running)
        deltas = [self._advance(id, running) for id, running in batch]
        for delta in deltas:
            if delta.finish_reason is not None:
                del self._running[delta.request_id]
        return StepOutput(deltas, self.load_snapshot())

    def load_snapshot(self) -> EngineLoad:
        count = min(len(self._running), self.info.max_running)
        return EngineLoad(
            running=count,
            waiting=len(self._running) - count,
            used_blocks=count,
            total_blocks=self.info.num_blocks,
            steps=self._steps,
            generation_tokens=self._generated,
        )

    def _begin(self) -> None:
        """Requests begin as soon as there is a place for them."""
        begun = [id for id in itertools.islice(self._running, self.info.max_running) if id in self._hurried]
        for id in begun:
            del self._hurried[id]
        if begun:
            self.on_begun(begun)

    def _advance(self, id: str, running: _Running) -> Delta:
        count = min(running.per_step, running.left)
        delta = Delta(id, [self._ids[letter] for letter in text_of(running.stream, running.done, count)])
        if not running.done:
            delta.cached_tokens, delta.queue_s, delta.prefill_s = 0, 0.0, 0.0
        running.done += count
        running.left -= count
        self._generated += count
        if not running.left:
            delta.finish_reason = "length"
        return delta


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("endpoint", help="where to listen: ipc://PATH or tcp://127.0.0.1:PORT")
    parser.add_argument("folder", type=Path, help="where to write the tokenizer that gateways need")
    parser.add_argument("--interval", type=float, default=0.0, help="seconds of one step")
    parser.add_argument("--max-running", type=int, default=1 << 20, help="requests that a step advances")
    parser.add_argument("--stream-interval", type=float, default=0.0, help="least seconds between two deliveries")
    parser.add_argument("--with-parent", action="store_true", help="end when standard input, a pipe, ends")
    options = parser.parse_args()
    if options.with_parent:
        die_with_parent()
    options.folder.mkdir(parents=True, exist_ok=True)
    tokenizer = write_tokenizer(options.folder, context_length=1 << 20)
    engine = SyntheticEngine(tokenizer, interval_s=options.interval, max_running=options.max_running)
    with Listener(options.endpoint) as listener:
        EngineServer(engine, listener, pacing=Pacing(options.stream_interval)).run()


if __name__ == "__main__":
    main()
