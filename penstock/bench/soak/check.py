"""What must hold after a round: nothing leaked, and every answer equals that of the request alone.

Alone means on the plain engine, one at a time. Batches of other sizes may round the last bit of a logit differently,
and a token may then be another where two were equal to that bit. So a token that differs is accepted if, with its own
logit raised by no more than `tie`, the plain engine gives the same text; such answers are counted.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace

from penstock.bench.engine import BenchError
from penstock.bench.soak.drive import Answer
from penstock.bench.soak.traffic import END, Case, text_of
from penstock.engine.adapters.spec import ADAPTER_UNKNOWN
from penstock.engine.core import Engine
from penstock.engine.request import Request, TokenLogprob
from penstock.engine.sequence import Sequence as EngineSequence

_TIES = 4
"""Tokens of one answer that may each be a tie."""


def alone(plain: Engine, request: Request) -> Answer:
    """The answer to a request that runs alone."""
    answer = Answer(Case(request, "finish"))
    plain.submit(replace(request, timeout_s=None))
    while plain.has_work:
        output = plain.step()
        for delta in output.deltas if output is not None else ():
            answer.add(delta)
    return answer


def verify(answer: Answer, plain: Engine, tie: float) -> int:
    """Compare an answer with the one alone; how many of its tokens were ties. Raises when it is wrong."""
    case, name = answer.case, answer.case.request.request_id
    if case.fate == "refuse":
        if answer.reason != "error" or answer.tokens:
            raise BenchError(f"{name} should have been refused, but ended with {answer.reason!r}")
        return 0
    if answer.reason == "error":
        if case.request.adapter and str(answer.error).startswith(ADAPTER_UNKNOWN) and not answer.tokens:
            return 0  # it was unloaded meanwhile
        raise BenchError(f"{name} failed: {answer.error}")
    cut = answer.reason in ("abort", "timeout")
    if cut and {"abort": "cancel", "timeout": "expire"}[str(answer.reason)] != case.fate:
        raise BenchError(f"{name} ended with {answer.reason!r}, but it should {case.fate}")
    if cut and not answer.tokens:
        return 0
    request = case.request
    if cut:
        request = replace(request, params=replace(request.params, max_tokens=len(answer.tokens)))
    expected, ties = _nearest(answer, plain, request, tie)
    if not cut and expected.reason != answer.reason:
        raise BenchError(f"{name} ended with {answer.reason!r}; alone with {expected.reason!r}")
    _compare_logprobs(name, answer.logprobs, expected.logprobs, tie)
    _compare_logprobs(name, answer.prompt_logprobs or [], expected.prompt_logprobs or [], tie)
    _look(answer)
    return ties


def _nearest(answer: Answer, plain: Engine, request: Request, tie: float) -> tuple[Answer, int]:
    """What the plain engine answers, ties decided the way they were; how many there were."""
    params = request.params
    raised: set[int] = set()
    while True:
        expected = alone(plain, replace(request, params=params))
        if expected.tokens == answer.tokens:
            return expected, len(raised)
        at = _first_difference(expected.tokens, answer.tokens)
        if at == len(answer.tokens) or answer.tokens[at] in raised or len(raised) == _TIES:
            break
        token = answer.tokens[at]
        raised.add(token)
        params = replace(params, logit_bias={**params.logit_bias, token: params.logit_bias.get(token, 0.0) + tie})
    raise BenchError(
        f"{request.request_id}: token {at} is {answer.tokens[at : at + 1]}, alone {expected.tokens[at : at + 1]} "
        f"(no tie within {tie}; {len(answer.tokens)} tokens, alone {len(expected.tokens)}; {request})"
    )


def _first_difference(a: list[int], b: list[int]) -> int:
    shorter = min(len(a), len(b))
    return next((index for index in range(shorter) if a[index] != b[index]), shorter)


def _compare_logprobs(
    name: str, got: Sequence[TokenLogprob | None], expected: Sequence[TokenLogprob | None], tie: float
) -> None:
    if len(got) != len(expected):
        raise BenchError(f"{name}: {len(got)} log-probabilities, alone {len(expected)}")
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        ours = [] if one is None else [one.logprob, *one.top_logprobs]
        theirs = [] if other is None else [other.logprob, *other.top_logprobs]
        if len(ours) != len(theirs) or any(abs(a - b) > 2 * tie for a, b in zip(ours, theirs, strict=True)):
            raise BenchError(f"{name}: log-probabilities at {index} are {ours}, alone {theirs}")


def _look(answer: Answer) -> None:
    """Check that a complete answer has the form that was asked for."""
    form = answer.case.form
    if form is None or answer.reason not in ("complete", "stop"):
        return
    tokens = answer.tokens[:-1] if answer.tokens[-1] == END else answer.tokens
    if not form.valid(tokens):
        raise BenchError(f"{answer.case.request.request_id} is not {form.name}: {text_of(tokens)!r}")


def check_objects(engines: Sequence[Engine], matchers: set[type], grammars: int) -> None:
    """Sequences and matchers that are still in memory: only the last ones of every row, and compiled grammars."""
    gc.collect()
    rows = sum(engine.info.max_running * (2 if engine.config.draft_model else 1) for engine in engines)
    most = rows + sum(2 * engine.scheduler.SLACK for engine in engines)
    alive = gc.get_objects()
    sequences = sum(type(thing) is EngineSequence for thing in alive)
    if sequences > most:
        raise BenchError(f"{sequences} sequences are in memory though nothing runs; at most {most} may be")
    held = sum(type(thing) in matchers for thing in alive)
    if held > grammars * len(engines) + sequences:
        raise BenchError(f"{held} matchers are in memory for {sequences} sequences and {grammars} grammars")
