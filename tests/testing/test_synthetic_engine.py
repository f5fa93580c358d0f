"""The engine of the gateway's benchmarks: a text that can be checked, at a pace that can be told."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engine.request import Request, SamplingParams
from penstock.engine_host.interfaces import BeginsPrompts
from penstock.testing.synthetic_engine import SyntheticEngine, text_of
from penstock.text import load_text
from penstock.text.byte_tokenizer import write_tokenizer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def request(id: str, stream: int, tokens: int, per_step: int = 0) -> Request:
    return Request(id, [1, 2], SamplingParams(max_tokens=tokens, seed=stream, top_k=per_step))


def run(engine: SyntheticEngine, steps: int) -> dict[str, list[int]]:
    """What `steps` steps that produce something add to each request."""
    said: dict[str, list[int]] = {}
    while steps:
        output = engine.step()
        if output is not None:
            steps -= 1
            for delta in output.deltas:
                said.setdefault(delta.request_id, []).extend(delta.tokens)
    return said


def test_every_stream_has_a_text_of_its_own_however_it_is_cut() -> None:
    whole = text_of(7, 0, 200_000)
    assert len(whole) == 200_000
    assert text_of(7, 65_000, 1000) == whole[65_000:66_000]
    assert len({text_of(number, 0, 20) for number in range(2000)}) == 2000


def test_tokens_come_one_per_interval_and_say_the_text(tmp_path: Path) -> None:
    clock = Clock()
    engine = SyntheticEngine(write_tokenizer(tmp_path), interval_s=0.5, clock=clock, sleep=clock.sleep)
    text = load_text(tmp_path)
    engine.submit(request("a", 3, 5))
    engine.submit(request("b", 4, 100, per_step=10))
    engine.submit(request("c", 5, 100))
    began = clock.now
    said = run(engine, 4)
    assert clock.now - began == pytest.approx(1.5, abs=0.01)
    assert text.decode(said["a"]) == text_of(3, 0, 4)
    assert text.decode(said["b"]) == text_of(4, 0, 40)
    engine.abort("c")
    said = run(engine, 1)
    assert text.decode(said["a"]) == text_of(3, 4, 1) and "c" not in said
    assert engine.load_snapshot().running == 1 and engine.has_work, "a has ended, b goes on"


def test_without_an_interval_a_request_is_answered_whole(tmp_path: Path) -> None:
    engine = SyntheticEngine(write_tokenizer(tmp_path))
    engine.submit(request("a", 3, 8))
    output = engine.step()
    assert output is not None
    (delta,) = output.deltas
    assert len(delta.tokens) == 8 and delta.finish_reason == "length" and not engine.has_work


def test_requests_that_may_not_wait_begin_when_there_is_a_place(tmp_path: Path) -> None:
    engine = SyntheticEngine(write_tokenizer(tmp_path), interval_s=1.0, max_running=2, sleep=lambda seconds: None)
    assert isinstance(engine, BeginsPrompts)
    begun: list[str] = []
    engine.on_begun = begun.extend
    for name, patience_s in (("a", None), ("b", 0.1), ("c", 0.1), ("d", 0.1)):
        engine.submit(Request(name, [1], SamplingParams(max_tokens=2), patience_s=patience_s))
    engine.step()
    assert begun == ["b"]
    engine.abort("c")
    engine.abort("a")
    engine.step()
    assert begun == ["b", "d"]
