"""Prompts computed by another engine (R-ENG-11), when requests, gateways or engines leave, or there is no room."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.core import Engine
from penstock.engine.request import Request
from penstock.engine_host.handover.fetcher import Ended
from penstock.engine_host.handover.inbound import Incoming
from penstock.errors import ConfigError
from penstock.protocol.messages import Abort, Drain, Leaving, Submit
from tests.engine.harness import assert_idle, generate, greedy, make_engine
from tests.engine.tiny import write_checkpoint
from tests.engine_host.client import connected, eventually, serving
from tests.engine_host.handover import SLOW, Halted, decoder, pair, source, text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("llama"), spread=0.5)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Engine:
    """What the answers should be."""
    return make_engine(folder)


@pytest.mark.slow
def test_without_room_or_time_a_request_waits_for_no_more_blocks(folder: Path, alone: Engine) -> None:
    with pair(folder, num_blocks=56) as (world, giver):  # 30 of them are held from the start, 44 would be needed
        quick = world.engine.step
        world.engine.step = lambda: (time.sleep(0.005), quick())[1]  # type: ignore[method-assign]
        world.ask(greedy("running", text(1, 480), 390))
        assert eventually(lambda: world.engine.load_snapshot().running == 1)
        request = greedy("crowded", text(2), 6)
        world.ask(request)
        tokens, _ = world.client.finish("crowded")
        assert tokens == generate(alone, request)["crowded"]
        assert (world.counts.handovers, world.counts.fallbacks) == (1, 1)
        world.engine.step = quick  # type: ignore[method-assign]
        assert eventually(lambda: not world.engine.has_work)

        step = giver.step
        giver.step = lambda: (time.sleep(0.05), step())[1]  # type: ignore[method-assign]
        world.ask(replace(greedy("late", text(3), 6), timeout_s=0.3))
        _, last = world.client.finish("late")
        assert last.finish_reason == "timeout" and world.counts.fallbacks == 2
        giver.step = step  # type: ignore[method-assign]


def test_the_last_blocks_may_find_no_room(folder: Path, alone: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """They and the end of their transfer are taken in together: the request goes on once."""
    take_in = Incoming._take_in

    def at_its_end(incoming: Incoming) -> None:
        if incoming.fetcher.news and isinstance(incoming.fetcher.news[-1], Ended):
            take_in(incoming)

    monkeypatch.setattr(Incoming, "_take_in", at_its_end)
    with pair(folder, num_blocks=56) as (world, _):  # 51 of them are held, 8 would be needed
        halted = Halted(world.engine, lambda: world.engine.load_snapshot().used_blocks > 48)
        world.client.send(Submit(greedy("running", text(1, 800), 40)))
        assert eventually(lambda: world.engine.load_snapshot().used_blocks > 48)
        request = greedy("crowded", text(2, 140), 6)
        world.ask(request)
        assert eventually(lambda: world.counts.fallbacks == 1)
        halted.let_go()
        tokens, _ = world.client.finish("crowded")
        assert tokens == generate(alone, request)["crowded"]
        assert (world.counts.handovers, world.counts.waiting) == (0, 0)
        assert eventually(lambda: not world.engine.has_work)


def test_engines_that_went_away_are_forgotten(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine_host.handover.fetcher.FORGET_S", 0.0)
    with pair(folder) as (world, _):
        world.answer(greedy("known", text(1), 2))
        lasting = world.source
        for number in range(3):
            world.source = source(f"ipc://{folder}/nobody{number}", wait_s=0.1)
            world.answer(greedy(f"gone{number}", text(2 + number), 2))
        world.source = lasting
        world.answer(greedy("again", text(9), 2))
        assert (world.counts.handovers, world.counts.fallbacks) == (2, 3)
        fetching = [thread for thread in threading.enumerate() if thread.name == "block fetcher"]
        (fetcher,) = [vars(thread)["_target"].__self__ for thread in fetching]
        assert [endpoint for endpoint, _ in fetcher._links] == [lasting.endpoint]


def test_a_prefill_engine_that_drains_sends_what_was_asked_for(folder: Path, alone: Engine) -> None:
    with pair(folder) as (world, giver):
        request = greedy("r", text(1, 1000), 6)
        halted = Halted(giver, lambda: world.counts.blocks_in > 0)
        world.ask(request)
        assert eventually(lambda: world.counts.blocks_in > 0)
        with connected(world.source.endpoint) as operator:
            operator.hello()
            operator.send(Drain())
            assert operator.until(Leaving) is not None
            halted.let_go()
            assert world.client.finish("r")[0] == generate(alone, request)["r"]
        assert (world.counts.handovers, world.counts.fallbacks) == (1, 0)
        assert world.answer(greedy("next", text(2), 2))[0] == generate(alone, greedy("next", text(2), 2))["next"]
        assert world.counts.fallbacks == 1 and not giver.has_work


def test_an_abort_while_waiting_reaches_both_engines(folder: Path) -> None:
    with pair(folder) as (world, giver):
        halted = Halted(giver, lambda: world.counts.blocks_in > 0)
        world.ask(greedy("r", text(1, 1000), 5))
        assert eventually(lambda: world.counts.blocks_in > 0)
        world.client.send(Abort("r"))
        _, last = world.client.finish("r")
        assert last.finish_reason == "abort"
        halted.let_go()
        assert eventually(lambda: not giver.has_work and giver.load_snapshot().generation_tokens == 0)
        world.answer(greedy("next", text(2), 3))
        assert world.counts.handovers == 1


def test_a_gateway_that_leaves_takes_its_waiting_requests_with_it(folder: Path) -> None:
    with pair(folder) as (world, giver):
        halted = Halted(giver, lambda: True)
        with connected(world.endpoint) as other:
            other.hello()
            other.send(Submit(replace(greedy("r", text(1, 1000), 5), handover=world.source)))
            assert eventually(lambda: world.counts.waiting == 1)
        assert eventually(lambda: world.counts.waiting == 0)
        halted.let_go()
        assert eventually(lambda: world.counts.waiting == 0 and not giver.has_work)


@pytest.mark.parametrize(
    ("differs", "why"),
    [({"kv_dtype": "int8"}, "in int8"), ({"block_size": 32}, "32 tokens"), ({"role": "both"}, "none to give")],
)
def test_blocks_that_do_not_fit_are_refused_with_the_reason(
    folder: Path, alone: Engine, caplog: pytest.LogCaptureFixture, differs: dict[str, Any], why: str
) -> None:
    giver = make_engine(folder, **{"role": "prefill", **differs})
    with serving(giver) as running, decoder(folder, source(running.endpoint)) as world:
        for name in ("first", "second"):
            request = greedy(name, text(1 if name == "first" else 2), 6)
            assert world.answer(request)[0] == generate(alone, request)[name]
        assert world.counts.fallbacks == 2 and world.counts.blocks_in == 0
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(told) == 1 and why in told[0]


@pytest.mark.parametrize("side", ["giver", "taker"])
def test_without_memory_for_blocks_prompts_are_computed_where_they_are_used(
    folder: Path, alone: Engine, caplog: pytest.LogCaptureFixture, side: str
) -> None:
    giver = make_engine(folder, role="prefill")
    with serving(giver) as running, decoder(folder, source(running.endpoint)) as world:
        exchange = (giver if side == "giver" else world.engine).exchange
        assert exchange is not None
        make = exchange.blocks.make_mover

        def refuse(num_slots: int) -> Any:
            raise ConfigError("it cannot be pinned")

        exchange.blocks.make_mover = refuse
        for number in (1, 2):
            request = greedy(f"r{number}", text(number), 6)
            assert world.answer(request)[0] == generate(alone, request)[request.request_id]
        assert world.counts.blocks_in == 0
        exchange.blocks.make_mover = make
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert told == ["no blocks are handed over: it cannot be pinned"]
    assert_idle(giver)


@pytest.mark.slow
def test_nothing_is_lost_or_leaked_whatever_happens_in_whatever_order(folder: Path, alone: Engine) -> None:
    """Shared beginnings, tenants, aborts, and a prefill engine that comes and goes; few blocks on both sides."""
    rng = random.Random(3)
    endpoint = f"ipc://{folder}/prefill"
    with decoder(folder, source(endpoint, wait_s=5.0), num_blocks=160, token_budget=64) as world:
        for life in range(8):
            giver = make_engine(folder, role="prefill", num_blocks=100, **SLOW)
            requests, aborted = list[Request](), set[str]()
            with serving(giver, endpoint) as running:
                for number in range(12):
                    prompt = text(rng.randrange(3), rng.randrange(50, 600)) + text(rng.randrange(40), rng.randrange(90))
                    request = greedy(f"{life}.{number}", prompt, rng.randrange(1, 12))
                    requests.append(replace(request, cache_salt=rng.choice(("a", "b"))))
                    world.ask(requests[-1])
                    if rng.random() < 0.2:
                        aborted.add(request.request_id)
                        world.client.send(Abort(request.request_id))
                    time.sleep(rng.random() * 0.05)
                if life % 2:
                    running.server.stop("it dies")
                tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
                ended: set[str] = set()
                for delta in world.client.deltas():
                    assert delta.error is None, delta.error
                    tokens[delta.request_id] += delta.tokens
                    if delta.finish_reason is not None:
                        ended.add(delta.request_id)
                    if len(ended) == len(requests):
                        break
            assert ended == set(tokens)
            expected = generate(alone, *requests)
            wrong = [id for id in tokens if tokens[id] != expected[id][: len(tokens[id])]]
            cut = [id for id in tokens if id not in aborted and len(tokens[id]) != len(expected[id])]
            assert not wrong and not cut, (wrong, cut)
            assert eventually(lambda: world.counts.waiting == 0 and not world.engine.has_work)
            if not life % 2:
                assert_idle(giver)
        assert world.counts.handovers > 10 and world.counts.fallbacks > 0, world.counts
