"""The same interface with the engine on a thread."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engine.request import Request, SamplingParams
from penstock.protocol.errors import EngineLost
from penstock.testing.in_process_backend import InProcessBackend
from tests.gateway.conftest import eventually
from tests.scripted import ScriptedEngine, make_text


async def test_generates_aborts_and_closes(tmp_path: Path) -> None:
    text = make_text(tmp_path)
    engine = ScriptedEngine(text, "word " * 100, step_s=0.002)
    backend = InProcessBackend(engine)
    await backend.start()
    assert (await backend.wait_ready(60)).instance == engine.info.instance
    params = SamplingParams(max_tokens=5)
    tokens = [t async for delta in backend.generate(Request("a", [1], params)) for t in delta.tokens]
    assert text.decode(tokens) == "word "
    stream = backend.generate(Request("b", [1], SamplingParams(max_tokens=400)))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    await eventually(lambda: engine.aborted == ["b"])
    await backend.close()
    assert not backend.ready


async def test_an_engine_that_raises_fails_its_requests(tmp_path: Path) -> None:
    class Broken(ScriptedEngine):
        def step(self):  # type: ignore[no-untyped-def]
            if self.has_work:
                raise RuntimeError("kaput")
            return super().step()

    backend = InProcessBackend(Broken(make_text(tmp_path)))
    await backend.start()
    with pytest.raises(EngineLost):
        async for _ in backend.generate(Request("a", [1], SamplingParams(max_tokens=5))):
            pass
    assert not backend.ready
    await backend.close()
