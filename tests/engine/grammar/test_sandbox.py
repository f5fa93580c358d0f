"""Grammars are tried in a process of their own: whatever one does there, others and this process go on."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from llguidance import LLMatcher

from penstock.engine.grammar import sandbox as sandboxes
from penstock.engine.grammar.constraints import Constraints
from penstock.engine.grammar.interface import GrammarError, GrammarTooComplex, Interrupted
from penstock.engine.grammar.sandbox import GrammarSandbox, Limits, SandboxedCompiler
from penstock.engine.request import GRAMMAR_REFUSED, Request, SamplingParams
from tests.engine.grammar.tokens import VOCAB, VOCABULARY, compiler
from tests.engine_host.client import eventually

regex = LLMatcher.grammar_from_regex
GOOD = regex(r"[0-9]{3}-[a-z]+")
ENDLESS = regex("a?" * 100_000)
"""The attack: without limits 16 GB and minutes."""


@pytest.fixture(scope="module", autouse=True)
def patience() -> Iterator[None]:
    """However little of its time a busy machine gives to a process that wants only what nobody else does."""
    with patch.object(sandboxes, "_PATIENCE", 1e3):
        yield


class StoppedSandbox(GrammarSandbox):
    """The first grammar is not tried before `go_on`: it takes as long as a test needs."""

    child = 0

    def go_on(self) -> None:
        os.kill(self.child, signal.SIGCONT)

    def _spawn(self, connection: socket.socket) -> int:
        child = super()._spawn(connection)
        if not self.child:
            os.kill(child, signal.SIGSTOP)
            self.child = child
        return child


@pytest.fixture
def stopped() -> Iterator[StoppedSandbox]:
    sandbox = StoppedSandbox(VOCABULARY, VOCAB, Limits(compile_s=0.5))
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module")
def sandbox() -> Iterator[GrammarSandbox]:
    sandbox = GrammarSandbox(VOCABULARY, VOCAB, Limits(compile_s=0.5))
    sandbox.try_out(GOOD)
    yield sandbox
    sandbox.close()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_grammar_that_takes_too_long_is_refused_with_the_limit(sandbox: GrammarSandbox) -> None:
    before = resident()
    with pytest.raises(GrammarTooComplex, match=r"more than 0\.5 s of processor time"):
        sandbox.try_out(ENDLESS)
    assert resident() - before < 32 << 20, "it was not compiled here"
    assert sandbox.try_out(GOOD) < 32 << 20


def test_a_grammar_that_takes_too_much_memory_is_refused_with_the_limit() -> None:
    sandbox = GrammarSandbox(VOCABULARY, VOCAB, Limits(compile_s=30, memory=24 << 20))
    try:
        with pytest.raises(GrammarTooComplex, match="more than 24 MiB of memory"):
            sandbox.try_out(regex("(x{1000}){1000}"))
        sandbox.try_out(GOOD)
    finally:
        sandbox.close()


def test_a_grammar_whose_masks_take_too_long_is_refused() -> None:
    sandbox = GrammarSandbox(VOCABULARY, VOCAB, Limits(compile_s=30, mask_s=0.01))
    try:
        with pytest.raises(GrammarTooComplex, match="tokens that may come next"):
            sandbox.try_out(regex("abc" * 25_000))
    finally:
        sandbox.close()


def test_what_is_wrong_is_said(sandbox: GrammarSandbox) -> None:
    with pytest.raises(GrammarError, match="nonsense"):
        sandbox.try_out("start: nonsense")
    with GrammarSandboxWithoutVocabulary() as plain, pytest.raises(GrammarError, match="nonsense"):
        plain.try_out("start: nonsense")


class GrammarSandboxWithoutVocabulary(GrammarSandbox):
    def __enter__(self) -> GrammarSandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def test_others_are_answered_while_one_is_tried(stopped: StoppedSandbox) -> None:
    failed: list[BaseException] = []

    def attack() -> None:
        try:
            stopped.try_out(ENDLESS)
        except GrammarTooComplex as error:
            failed.append(error)

    attacker = threading.Thread(target=attack)
    attacker.start()
    assert eventually(lambda: stopped.child)
    for _ in range(4):
        stopped.try_out(GOOD)
    assert attacker.is_alive() and not failed
    stopped.go_on()
    attacker.join()
    assert failed


def test_a_trial_ends_when_nobody_waits_for_it(stopped: StoppedSandbox) -> None:
    kills: list[object] = []

    def interruptible(kill: object) -> None:
        kills.append(kill)
        if callable(kill):
            threading.Timer(0.05, kill).start()

    with pytest.raises(Interrupted):
        stopped.try_out(ENDLESS, interruptible)
    assert kills[-1] is None


def test_a_sandbox_that_dies_is_started_again(sandbox: GrammarSandbox) -> None:
    assert sandbox._process is not None
    sandbox._process.send_signal(signal.SIGKILL)
    sandbox._process.wait()
    sandbox.try_out(GOOD)


def test_the_engine_compiles_only_what_passed() -> None:
    compiled: list[str] = []

    class Recording(type(compiler(VOCAB))):  # type: ignore[misc]
        def compile(self, grammar: str, interruptible: object = None) -> object:
            compiled.append(grammar)
            return super().compile(grammar)

    constraints = Constraints(
        lambda size: SandboxedCompiler(VOCABULARY, size, lambda words: Recording(words, size)), VOCAB
    )
    try:
        bad, good = regex("a?" * 2_000 + "b" * 40_000), GOOD
        for name, grammar in (("bad", bad), ("good", good), ("same", good), ("late", ENDLESS)):
            timeout = 0.5 if name == "late" else None
            params = SamplingParams(grammar=grammar)
            owner = "good" if name == "same" else name
            assert constraints.open(Request(name, [1], params, owner=owner, timeout_s=timeout), 0.0) is None
        assert constraints.opening == 4
        assert [request.request_id for request in constraints.expired(1.0)] == ["late"]
        found: dict[str, object] = {}
        deadline = time.monotonic() + 200
        while constraints.opening and time.monotonic() < deadline:
            found |= {request.request_id: matcher for request, _, matcher in constraints.opened()}
            time.sleep(0.005)
        assert compiled == [good], "once for two requests, and never what was refused"
        assert str(found["bad"]).startswith(GRAMMAR_REFUSED) and "too complex" in str(found["bad"])
        assert not isinstance(found["good"], str) and not isinstance(found["same"], str)
        params = SamplingParams(grammar=good)
        assert constraints.open(Request("again", [1], params, owner="good"), 0.0) is not None
        # Another tenant cannot tell from the time it takes that somebody has used the grammar.
        assert constraints.open(Request("of another", [1], params, owner="another"), 0.0) is None
    finally:
        constraints.close()
