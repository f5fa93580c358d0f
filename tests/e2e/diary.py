"""An engine process that writes down, before anybody hears of it, every token it makes.

`python -m tests.e2e.diary ENDPOINT FOLDER LOG`: a scripted engine behind the real engine server."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from penstock.engine.request import Request, StepOutput
from penstock.engine_host.server import EngineServer
from penstock.protocol.transport import Listener
from penstock.text import TextModel, load_text
from tests.scripted import ScriptedEngine

STEP_S = 0.004
MOST_TOKENS = 10_000


class Diary(ScriptedEngine):
    """Writes one line per delta: when, for which request, how many tokens, and how it ended."""

    def __init__(self, text: TextModel, log: Path) -> None:
        super().__init__(text, self._answer, step_s=STEP_S, max_model_len=MOST_TOKENS + 100)
        letters = text.encode("abcdefghijklmnopqrstuvwxyz", special=False)
        self._tokens = [letters[(place * place // 7) % len(letters)] for place in range(MOST_TOKENS)]
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def _answer(self, request: Request) -> list[int]:
        return self._tokens

    def step(self) -> StepOutput | None:
        output = super().step()
        if output is not None:
            now = time.time()
            lines = (f"{now:.3f} {d.request_id} {len(d.tokens)} {d.finish_reason or '-'}\n" for d in output.deltas)
            os.write(self._log, "".join(lines).encode())
        return output


@dataclass
class Run:
    """What one engine process made for one request."""

    tokens: int = 0
    ended: str | None = None
    last_at: float = 0.0


def read_diary(log: Path) -> dict[str, Run]:
    runs: dict[str, Run] = {}
    for line in log.read_text().splitlines():
        at, request_id, tokens, reason = line.split()
        run = runs.setdefault(request_id, Run())
        run.tokens += int(tokens)
        run.last_at = float(at)
        if reason != "-":
            run.ended = reason
    return runs


def main(endpoint: str, folder: str, log: str) -> int:
    engine = Diary(load_text(Path(folder)), Path(log))
    with Listener(endpoint) as listener:
        return EngineServer(engine, listener).run()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
