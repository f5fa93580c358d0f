"""Requests for several adapters give in company, and on ranks, what each of them gives alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.core import Engine
from penstock.engine.request import Request, SamplingParams
from tests.engine.harness import assert_idle, drain, generate, make_engine
from tests.engine.parallel.threads import threaded_engine

TIGHT: dict[str, Any] = {
    "num_blocks": 24,
    "block_size": 4,
    "token_budget": 16,
    "adapter_slots": 2,
    "speculation": "ngram",
}
"""Preemption, fewer slots than adapters, speculation."""

on_grids = pytest.mark.parametrize(
    "grid",
    [(2, 2), pytest.param((2, 1), marks=pytest.mark.slow), pytest.param((1, 3), marks=pytest.mark.slow)],
    ids=str,
)


def one_by_one(engine: Engine, requests: Iterable[Request]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for request in requests:
        found |= generate(engine, request)
    return found


def assert_same_in_company(
    base: Path,
    specs: tuple[AdapterSpec, ...],
    requests: list[Request],
    alone: dict[str, list[int]],
    settings: dict[str, Any] = TIGHT,
) -> None:
    """Two long requests without an adapter run first and do not fit together, so that something is preempted however
    long the adapters take to load."""
    long = [
        Request(
            f"long {number}",
            [(7 * number + i) % 199 for i in range(30)],
            SamplingParams(max_tokens=40, temperature=0.0),
        )
        for number in range(2)
    ]
    engine = make_engine(base, adapters=specs, **settings)
    found = generate(engine, *long, *requests)
    assert {request.request_id: found[request.request_id] for request in requests} == alone
    assert engine.load_snapshot().preemptions > 0
    assert_idle(engine)


def assert_same_in_deterministic_company(
    base: Path, specs: tuple[AdapterSpec, ...], make: Callable[[], list[Request]]
) -> None:
    """To the last bit of log-probabilities. `make`: makes the requests, which an engine takes only once."""
    settings: dict[str, Any] = {"deterministic": True, "token_budget": 24}
    alone, company = (make_engine(base, adapters=specs, **settings) for _ in range(2))
    found = [scores for request in make() for scores in scored(alone, request).items()]
    assert scored(company, *make()) == dict(found)


def scored(engine: Engine, *requests: Request) -> dict[str, list[tuple[int, float]]]:
    """Tokens and their log-probabilities."""
    for request in requests:
        engine.submit(replace(request, params=replace(request.params, logprobs=0)))
    found: dict[str, list[tuple[int, float]]] = {request.request_id: [] for request in requests}
    for delta in drain(engine):
        assert delta.finish_reason != "error", delta.error
        found[delta.request_id] += zip(delta.tokens, (one.logprob for one in delta.logprobs or ()), strict=True)
    return found


def assert_same_on_ranks(
    base: Path,
    specs: tuple[AdapterSpec, ...],
    requests: list[Request],
    alone: dict[str, list[int]],
    grid: tuple[int, int],
) -> None:
    with threaded_engine(base, *grid, adapters=specs, token_budget=32) as engine:
        assert generate(engine, *requests) == alone
        assert_idle(engine)
