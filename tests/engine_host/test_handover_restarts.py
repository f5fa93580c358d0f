"""A rank that dies while blocks are handed over, and is started again alone (R-ENG-10, R-ENG-11): every request gets
the answer of one device, whichever side has lost it, and no block and no slot is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from penstock.engine.core import Engine
from penstock.engine.parallel import blocks, launch
from penstock.engine.request import Request
from tests.engine.harness import assert_idle, generate, greedy, make_engine
from tests.engine.parallel.lost_rank import lose
from tests.engine.parallel.threads import _spawn, threaded_engine
from tests.engine.tiny import write_checkpoint
from tests.engine_host.client import connected, eventually, serving
from tests.engine_host.handover import World, source, text

pytestmark = pytest.mark.slow
RESTARTS: dict[str, Any] = {"rank_restarts": 3, "watchdog_s": 120, "kv_dtype": "full"}
Grid = tuple[int, int, dict[str, Any]]
DATA: dict[str, Any] = {"expert_parallel": True, "attention_parallel": "data"}


@contextmanager
def world(folder: Path, giving: Grid, taking: Grid, **settings: Any) -> Iterator[tuple[World, Engine, Engine]]:
    """Engines of two grids that both outlive a rank: what decodes, and what computes prompts for it."""
    with ExitStack() as stack:

        def engine(role: str, grid: Grid, **more: Any) -> Engine:
            tensor, pipeline, own = grid
            found = stack.enter_context(
                threaded_engine(folder, tensor, pipeline, role=role, **RESTARTS, **own, **settings, **more)
            )
            assert found.ranks is not None
            found.ranks.watch(lambda why: None, exit_after_s=None)
            return found

        giver, taker = engine("prefill", giving, token_budget=16), engine("decode", taking)
        stack.enter_context(patch.object(launch, "_spawn", _spawn))
        with serving(giver) as there, serving(taker) as here, connected(here.endpoint) as client:
            client.hello()
            yield World(taker, here.endpoint, client, source(there.endpoint, wait_s=60.0)), giver, taker
        for each in (giver, taker):
            assert_idle(each)
            assert each.exchange is not None and len(each.exchange.slots) == each.exchange.num_slots, "slots leaked"


@pytest.mark.parametrize("whose", ["giver", "taker"])
@pytest.mark.parametrize(
    ("family", "giving", "taking", "sees"),
    [
        ("llama-gqa", (2, 1, {}), (1, 2, {}), True),
        ("llama-gqa", (1, 2, {}), (2, 1, {}), False),
        ("qwen3-moe", (2, 1, DATA), (2, 1, DATA), True),
        ("qwen3-next", (2, 1, {}), (1, 2, {}), True),
    ],
)
def test_a_handover_in_flight_is_made_again(
    tmp_path: Path, family: str, giving: Grid, taking: Grid, whose: str, sees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sees`: whether ranks share the memory of blocks, as on one machine."""
    if not sees:
        monkeypatch.setattr(blocks, "open_shared", lambda *_: None)
    folder = write_checkpoint(family, tmp_path / "model", spread=0.5)
    turns = [[greedy(f"r{turn}{i}", text(2 * turn + i % 2, 400), 12) for i in range(3)] for turn in range(2)]
    alone = make_engine(folder, kv_dtype="full")
    with world(folder, giving, taking) as (found, giver, taker):
        lost = giver if whose == "giver" else taker
        for turn, requests in enumerate(turns):
            came = found.counts.blocks_in
            for request in requests:
                found.ask(request)
            assert eventually(lambda came=came: found.counts.blocks_in > came + 3)
            lose(lost, 1)
            assert answers(found, requests) == generate(alone, *requests), turn
        assert lost.ranks is not None and lost.ranks.generation == 2
        assert found.counts.waiting == 0


def answers(found: World, requests: list[Request]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    left = set(tokens)
    for delta in found.client.deltas(120):
        if delta.request_id in left:
            assert delta.error is None, delta.error
            tokens[delta.request_id] += delta.tokens
            if delta.finish_reason is not None:
                left.remove(delta.request_id)
        if not left:
            break
    assert not left
    return tokens
