"""Prompts computed by one engine process and used by another (R-ENG-11): the same answer, whatever becomes of the
one that computes."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from penstock.engine.core import Engine
from penstock.engine.request import Delta
from penstock.engine_host.handover import fetcher
from penstock.protocol.messages import Abort, Begun, Count, Counted, Produced
from penstock.protocol.transport import CurveServer, generate_keypair
from tests.engine.harness import assert_idle, generate, greedy, make_engine
from tests.engine.tiny import write_checkpoint
from tests.engine_host.client import connected, eventually, serving
from tests.engine_host.handover import PATIENCE_S, SLOW, Halted, World, decoder, pair, prefiller, source, text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("llama"), spread=0.5)


@pytest.fixture(scope="module", params=["qwen3-next", pytest.param("deepseek-v4", marks=pytest.mark.slow)])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model with recurrent layers."""
    return write_checkpoint(request.param, tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def alone(folder: Path) -> Engine:
    """What the answers should be."""
    return make_engine(folder)


@pytest.mark.slow
def test_a_prompt_computed_in_another_process_gives_the_same_answer_whatever_becomes_of_it(
    folder: Path, alone: Engine, tmp_path: Path
) -> None:
    with prefiller(folder, tmp_path) as other, decoder(folder, source(other.endpoint)) as world:

        def check(name: str, number: int) -> Delta:
            request = greedy(name, text(number), 12)
            tokens, first = world.answer(request)
            assert tokens == generate(alone, request)[name]
            return first

        # It comes before the other engine has introduced itself, and is computed by it all the same.
        first = check("early", 1)
        check("late", 2)
        assert (world.counts.handovers, world.counts.fallbacks, world.counts.blocks_in) == (2, 0, 2 * 43)
        load = world.engine.load_snapshot()
        assert load.prefix_query_tokens - load.prefix_hit_tokens == 2 * 12, "only the prompt's tail was computed here"
        assert first.cached_tokens == 0, "nobody had it cached: it was computed for this request"

        # It stands still.
        world.source = replace(world.source, wait_s=0.3)
        os.kill(other.process.pid, signal.SIGSTOP)
        check("still", 3)
        os.kill(other.process.pid, signal.SIGCONT)
        assert world.counts.fallbacks == 1

        # It is killed in the midst of it.
        world.source = replace(world.source, wait_s=10.0)
        before = world.counts.blocks_in
        world.ask(greedy("killed", text(4), 12))
        assert eventually(lambda: world.counts.blocks_in > before)
        other.kill()
        tokens, _ = world.client.finish("killed")
        assert tokens == generate(alone, greedy("killed", text(4), 12))["killed"]
        assert before < world.counts.blocks_in < before + 43, "it was not in the midst of it"

        # It is gone, and nobody waits for it.
        world.source = replace(world.source, wait_s=1e6)
        with patch.object(fetcher, "CONNECT_S", 0.1):
            check("gone", 5)
        assert world.counts.fallbacks == 3


def test_a_gateway_is_told_when_the_other_engine_begins_with_a_prompt(folder: Path, alone: Engine) -> None:
    """Which is finished then, however late; `penstock.engine.request.Request.patience_s`."""
    with pair(folder) as (world, giver):
        halted = Halted(giver, lambda: bool(giver.scheduler.running))
        request = replace(greedy("begun", text(1), 5), patience_s=0.5)
        world.ask(request)
        told = world.client.until(Begun)
        assert isinstance(told, Begun) and told.request_ids == ["begun"]
        assert world.engine.load_snapshot().running == 0, "it is computed elsewhere"
        time.sleep(0.6)
        halted.let_go()
        assert world.client.finish("begun")[0] == generate(alone, request)["begun"]
        assert (world.counts.handovers, world.counts.fallbacks) == (1, 0)


def test_a_prompt_that_the_other_engine_has_not_begun_may_still_begin_here_in_time(folder: Path) -> None:
    with pair(folder, giver={**SLOW, "max_running": 1}) as (world, giver):
        halted = Halted(giver, lambda: bool(giver.scheduler.running))
        world.ask(greedy("before", text(1), 5))
        assert eventually(lambda: bool(giver.scheduler.running))
        world.ask(replace(greedy("late", text(2), 5), patience_s=0.2))
        world.ask(replace(greedy("aborted", text(3), 5), patience_s=60.0))
        assert eventually(lambda: len(giver.scheduler.live) == 3)
        time.sleep(0.2)
        world.client.send(Abort("aborted"))
        assert world.client.finish("aborted")[1].finish_reason == "abort"
        halted.let_go()  # it refuses what has waited too long for it, and this engine has time
        tokens, last = world.client.finish("late")
        assert len(tokens) == 5 and last.error is None
        assert world.counts.fallbacks == 1 and eventually(lambda: world.counts.handovers == 1)
        world.client.finish("before")


def test_only_what_is_missing_travels(folder: Path, alone: Engine) -> None:
    with pair(folder) as (world, _):
        world.answer(greedy("first", text(1), 5))
        assert world.counts.blocks_in == 43
        longer = greedy("longer", text(1)[:640] + text(2, 300), 5)
        tokens, first = world.answer(longer)
        assert tokens == generate(alone, longer)["longer"]
        assert world.counts.blocks_in == 43 + 58 - 40 and first.cached_tokens == 640
        world.answer(greedy("known", text(1), 5))
        short = greedy("short", text(3, 60), 5)
        assert world.answer(short)[0] == generate(alone, short)["short"]
        assert world.counts.handovers == 2, "neither a known prompt nor a short one is worth the way"


def test_the_state_of_recurrent_layers_travels_behind_the_blocks(hybrid: Path) -> None:
    alone = make_engine(hybrid)
    requests = [greedy(f"r{number}", text(number, 200 + 50 * number), 8) for number in range(4)]
    expected = generate(alone, *requests)
    with pair(hybrid, giver={"token_budget": 64}) as (world, _):
        for request in requests:
            world.ask(request)
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        ended = 0
        for delta in world.client.deltas():
            tokens[delta.request_id] += delta.tokens
            ended += delta.finish_reason is not None
            if ended == len(requests):
                break
        assert tokens == expected and (world.counts.handovers, world.counts.fallbacks) == (4, 0)
        load = world.engine.load_snapshot()
        assert load.prefix_query_tokens - load.prefix_hit_tokens == sum(1 + (len(r.prompt) - 1) % 16 for r in requests)
        # A running answer that goes on elsewhere takes its state along, too.
        moved = replace(requests[3], request_id="moved", produced=expected["r3"][:5])
        world.engine.scheduler.allocator.pool.forget_all()
        assert world.answer(moved)[0] == expected["r3"][5:] and world.counts.handovers == 5
        # Nothing but the state is missing.
        states = world.engine.scheduler.allocator.states
        assert states is not None
        blocks = world.counts.blocks_in
        states.pool.forget_all()
        assert world.answer(greedy("again", requests[3].prompt, 8))[0] == expected["r3"]
        assert (world.counts.handovers, world.counts.blocks_in) == (6, blocks)


@pytest.mark.slow
def test_states_come_from_another_process_until_it_is_killed(
    hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = make_engine(hybrid)
    with prefiller(hybrid, tmp_path) as other, decoder(hybrid, source(other.endpoint)) as world:
        for number in range(3):
            request = greedy(f"r{number}", text(number, 300), 10)
            if number == 2:
                other.kill()
                monkeypatch.setattr(fetcher, "CONNECT_S", 0.1)
            assert world.answer(request)[0] == generate(alone, request)[request.request_id]
        assert (world.counts.handovers, world.counts.fallbacks) == (2, 1)


def test_several_at_once_and_a_prefiller_that_decodes_nothing(folder: Path, alone: Engine) -> None:
    requests = [greedy(f"r{number}", text(number, 300 + 50 * number), 10) for number in range(6)]
    expected = generate(alone, *requests)
    with pair(folder) as (world, giver):
        for request in requests:
            world.ask(request)
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        ended = 0
        for delta in world.client.deltas():
            tokens[delta.request_id] += delta.tokens
            ended += delta.finish_reason is not None
            if ended == len(requests):
                break
        assert tokens == expected and world.counts.handovers == 6
        assert giver.load_snapshot().generation_tokens <= 6, "a prompt's own token, at most"


def test_of_sliding_windows_the_last_one_travels(tmp_path: Path) -> None:
    windowed = write_checkpoint("mistral-window", tmp_path, spread=0.5)
    requests = [greedy(f"r{number}", text(number, 300 + 50 * number), 8) for number in range(3)]
    expected = generate(make_engine(windowed), *requests)
    with pair(windowed) as (world, _):
        for request in requests:
            tokens, first = world.answer(request)
            assert tokens == expected[request.request_id] and first.cached_tokens == 0
        assert (world.counts.handovers, world.counts.fallbacks, world.counts.blocks_in) == (3, 0, 3 * 3)
        tokens, first = world.answer(greedy("known", requests[2].prompt, 8))
        assert tokens == expected["r2"] and world.counts.handovers == 3 and first.cached_tokens == 384


@pytest.mark.slow
def test_shards_with_sequences_of_their_own_give_and_take_prompts(tmp_path: Path) -> None:
    """Engines of several processes: prompts go to the shards that have room, some are aborted on their way."""
    folder = write_checkpoint("qwen3-moe", tmp_path, spread=0.3)
    alone = make_engine(folder)
    spread = {"tensor_parallel": 2, "expert_parallel": True, "attention_parallel": "data", "num_blocks": 150}
    requests = [greedy(f"r{number}", text(number, 300 + 50 * number), 10) for number in range(6)]
    expected = generate(alone, *requests)
    with ExitStack() as ends, pair(folder, giver={**SLOW, **spread}, **spread) as (world, giver):
        for engine in (giver, world.engine):
            ends.callback(engine.close)
        for number in range(4):
            world.ask(greedy(f"gone{number}", text(10 + number, 400), 10))
        assert eventually(lambda: world.counts.blocks_in > 0)
        for number in range(4):
            world.client.send(Abort(f"gone{number}"))
        for request in requests:
            world.ask(request)
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        ended = 0
        for delta in world.client.deltas(60):
            if delta.request_id in tokens:
                tokens[delta.request_id] += delta.tokens
                ended += delta.finish_reason is not None
            if ended == len(requests):
                break
        assert tokens == expected and world.counts.handovers >= 5
        used = [cache.pool.cached > 0 for cache in world.engine.scheduler.allocator.caches]
        assert used == [True, True]
        again = greedy("again", text(0, 300), 10)
        answer, first = world.answer(again)
        assert answer == expected["r0"] and (first.cached_tokens or 0) >= 288


def test_requests_with_the_same_prompt_wait_for_one_of_them(folder: Path, alone: Engine) -> None:
    """`n` choices, or a burst behind one long system prompt. The one that fetches may leave: another goes on."""
    requests = [greedy(f"r{number}", text(1) + [number], 8) for number in range(4)]
    expected = generate(alone, *requests)
    with pair(folder) as (world, giver):
        halted = Halted(giver, lambda: world.counts.blocks_in > 0)
        for request in requests:
            world.ask(request)
        assert eventually(lambda: world.counts.blocks_in > 0 and world.counts.waiting == 4)
        world.client.send(Abort("r0"))
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        firsts: dict[str, int] = {}
        ended = 0
        for delta in world.client.deltas():
            halted.let_go()  # the first is of the one that left
            tokens[delta.request_id] += delta.tokens
            firsts.setdefault(delta.request_id, delta.cached_tokens or 0)
            ended += delta.finish_reason is not None
            if ended == len(requests):
                break
        assert tokens == expected | {"r0": []}
        assert (world.counts.handovers, world.counts.blocks_in, world.counts.waiting) == (1, 43, 0)
        assert sorted(firsts[f"r{number}"] for number in (1, 2, 3))[1:] == [688, 688], "who followed had it cached"


def test_tenants_do_not_meet(folder: Path) -> None:
    """One tenant's blocks, at either engine, are nothing to another with the same prompt."""
    with pair(folder) as (world, giver):
        for count, tenant in enumerate(("a", "b"), start=1):
            _, first = world.answer(replace(greedy(tenant, text(1), 5), cache_salt=tenant))
            assert first.cached_tokens == 0 and world.counts.blocks_in == 43 * count
        assert giver.load_snapshot().prefix_hit_tokens == 0


def test_it_is_charged_once_and_what_the_other_engine_had_cached_counts_as_cached(folder: Path) -> None:
    with pair(folder) as (world, _):
        world.answer(greedy("charge:0", text(1), 5))
        with connected(world.endpoint) as client:
            client.hello()
            client.send(Count("question", ["charge"]))
            counted = client.receive()
            while not isinstance(counted, Counted):
                counted = client.receive()
            assert counted.entries == [Produced("charge:0", 5, 0, "length")]
        world.engine.scheduler.allocator.pool.forget_all()  # the decoder has lost it, the other engine has not
        _, first = world.answer(greedy("again:0", text(1), 5))
        assert first.cached_tokens == 688 and world.counts.handovers == 2


def test_between_machines_the_connection_is_encrypted_and_strangers_get_nothing(
    folder: Path, alone: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decoding engine's key must be among those that the other one admits."""
    (public, secret), (known_public, known), (_, stranger) = (generate_keypair() for _ in range(3))
    giver = make_engine(folder, role="prefill")
    with serving(giver, curve=CurveServer(secret, [known_public])) as running:
        for key, handovers in ((known, 1), (stranger, 0), ("", 0), ("nonsense", 0)):
            monkeypatch.setattr(fetcher, "CONNECT_S", PATIENCE_S if handovers else 0.1)
            engine = make_engine(folder, role="decode")
            to = source(running.endpoint, public_key=public)
            with serving(engine) as own:
                own.server._handovers._secret_key = key  # as `--curve-key` gives it
                with connected(own.endpoint) as client:
                    client.hello()
                    world = World(engine, own.endpoint, client, to)
                    for number in range(2):
                        request = greedy(f"r{number}", text(number), 4)
                        assert world.answer(request)[0] == generate(alone, request)[request.request_id]
                    assert (world.counts.handovers, world.counts.fallbacks) == (2 * handovers, 2 - 2 * handovers)
            assert_idle(engine)
