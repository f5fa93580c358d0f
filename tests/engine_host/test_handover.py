"""Prompts computed by one engine process and used by another (R-ENG-11): the same answer, whatever becomes of the
one that computes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.core import Engine
from penstock.engine.request import Delta, Handover, HandoverLoad, Request
from penstock.errors import ConfigError
from penstock.protocol.messages import Abort, Count, Counted, Drain, Produced, Submit
from penstock.protocol.transport import CurveServer, generate_keypair
from tests.engine.harness import assert_idle, generate, greedy, make_engine
from tests.engine.tiny import write_checkpoint
from tests.engine_host.client import Client, connected, eventually, serving

SLOW = {"token_budget": 16}
"""One block per step: prompts take their time."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("llama"), spread=0.5)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model with recurrent layers."""
    return write_checkpoint("qwen3-next", tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def alone(folder: Path) -> Engine:
    """What the answers should be."""
    return make_engine(folder)


@dataclass
class Prefiller:
    process: subprocess.Popen[bytes]
    endpoint: str

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def prefiller(folder: Path, tmp_path: Path) -> Iterator[Prefiller]:
    """`penstock engine --role prefill`, in a process of its own."""
    endpoint, config = f"ipc://{tmp_path}/prefill", tmp_path / "penstock.yaml"
    config.write_text(f"models: [{{name: tiny, source: {folder}, dtype: float32, threads: 1, token_budget: 16}}]\n")
    command = ["engine", "tiny", "-c", str(config), "--endpoint", endpoint, "--role", "prefill"]
    process = subprocess.Popen([sys.executable, "-m", "penstock", *command])
    try:
        with connected(endpoint) as client:
            client.hello(60)
        yield Prefiller(process, endpoint)
    finally:
        process.kill()
        process.wait()


@dataclass
class World:
    """An engine that decodes, its one gateway, and where prompts are computed."""

    engine: Engine
    endpoint: str
    client: Client
    source: Handover

    def ask(self, request: Request) -> None:
        self.client.send(Submit(replace(request, handover=self.source)))

    def answer(self, request: Request) -> tuple[list[int], Delta]:
        """Its tokens, and its first delta."""
        self.ask(request)
        first, tokens = None, list[int]()
        for delta in self.client.deltas(30):
            if delta.request_id == request.request_id:
                first = first or delta
                tokens += delta.tokens
                if delta.finish_reason is not None:
                    assert delta.error is None, delta.error
                    return tokens, first
        raise AssertionError(f"{request.request_id} did not finish")

    @property
    def counts(self) -> HandoverLoad:
        assert self.engine.exchange is not None
        return self.engine.exchange.counts


@contextmanager
def decoder(folder: Path, source: Handover, curve: CurveServer | None = None, **settings: Any) -> Iterator[World]:
    engine = make_engine(folder, role="decode", **settings)
    with ExitStack() as stack:
        running = stack.enter_context(serving(engine, curve=curve))
        client = stack.enter_context(connected(running.endpoint))
        client.hello()
        yield World(engine, running.endpoint, client, source)
    assert_idle(engine)
    assert engine.exchange is not None and len(engine.exchange.slots) == engine.exchange.num_slots, "slots leaked"


@contextmanager
def pair(folder: Path, **settings: Any) -> Iterator[tuple[World, Engine]]:
    """Two engines in this process; neither may be left with anything in the end."""
    giver = make_engine(folder, role="prefill", **settings.pop("giver", SLOW))
    with serving(giver) as running, decoder(folder, source(running.endpoint), **settings) as world:
        yield world, giver
    assert_idle(giver)


def source(endpoint: str, **options: Any) -> Handover:
    return Handover(endpoint, **{"least_tokens": 64, **options})


def text(number: int, length: int = 700) -> list[int]:
    return [(number * 31 + 7 * i * i + 3 * i) % 199 for i in range(length)]


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
        tokens, _ = world.client.finish("killed", 30)
        assert tokens == generate(alone, greedy("killed", text(4), 12))["killed"]
        assert before < world.counts.blocks_in < before + 43, "it was not in the midst of it"

        # It is gone, and nobody waits for it.
        began = time.monotonic()
        check("gone", 5)
        assert world.counts.fallbacks == 3 and time.monotonic() - began < 5


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
        for delta in world.client.deltas(30):
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
def test_states_come_from_another_process_until_it_is_killed(hybrid: Path, tmp_path: Path) -> None:
    alone = make_engine(hybrid)
    with prefiller(hybrid, tmp_path) as other, decoder(hybrid, source(other.endpoint)) as world:
        for number in range(3):
            request = greedy(f"r{number}", text(number, 300), 10)
            if number == 2:
                other.kill()
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
        for delta in world.client.deltas(30):
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
    with pair(folder) as (world, _):
        for request in requests:
            world.ask(request)
        assert eventually(lambda: world.counts.blocks_in > 0)
        world.client.send(Abort("r0"))
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        firsts: dict[str, int] = {}
        ended = 0
        for delta in world.client.deltas(30):
            tokens[delta.request_id] += delta.tokens
            firsts.setdefault(delta.request_id, delta.cached_tokens or 0)
            ended += delta.finish_reason is not None
            if ended == len(requests):
                break
        assert tokens == expected | {"r0": []}
        assert (world.counts.handovers, world.counts.blocks_in, world.counts.waiting) == (1, 43, 0)
        assert sorted(firsts[f"r{number}"] for number in (1, 2, 3))[1:] == [688, 688], "who followed had it cached"


@pytest.mark.slow
def test_without_room_or_time_a_request_waits_for_no_more_blocks(folder: Path, alone: Engine) -> None:
    with pair(folder, num_blocks=56) as (world, giver):  # 30 of them are held from the start, 44 would be needed
        quick = world.engine.step
        world.engine.step = lambda: (time.sleep(0.005), quick())[1]  # type: ignore[method-assign]
        world.ask(greedy("running", text(1, 480), 390))
        assert eventually(lambda: world.engine.load_snapshot().running == 1)
        request = greedy("crowded", text(2), 6)
        world.ask(request)
        tokens, _ = world.client.finish("crowded", 30)
        assert tokens == generate(alone, request)["crowded"]
        assert (world.counts.handovers, world.counts.fallbacks) == (1, 1)
        world.engine.step = quick  # type: ignore[method-assign]
        assert eventually(lambda: not world.engine.has_work)

        step = giver.step
        giver.step = lambda: (time.sleep(0.05), step())[1]  # type: ignore[method-assign]
        world.ask(replace(greedy("late", text(3), 6), timeout_s=0.3))
        _, last = world.client.finish("late", 30)
        assert last.finish_reason == "timeout" and world.counts.fallbacks == 2
        giver.step = step  # type: ignore[method-assign]


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
        world.ask(request)
        assert eventually(lambda: world.counts.blocks_in > 0)
        with connected(world.source.endpoint) as operator:
            operator.hello()
            operator.send(Drain())
            assert world.client.finish("r", 30)[0] == generate(alone, request)["r"]
        assert (world.counts.handovers, world.counts.fallbacks) == (1, 0)
        assert world.answer(greedy("next", text(2), 2))[0] == generate(alone, greedy("next", text(2), 2))["next"]
        assert world.counts.fallbacks == 1 and not giver.has_work


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


def test_an_abort_while_waiting_reaches_both_engines(folder: Path) -> None:
    with pair(folder) as (world, giver):
        world.ask(greedy("r", text(1, 1000), 5))
        assert eventually(lambda: world.counts.blocks_in > 0)
        world.client.send(Abort("r"))
        _, last = world.client.finish("r")
        assert last.finish_reason == "abort"
        assert eventually(lambda: not giver.has_work and giver.load_snapshot().generation_tokens == 0)
        world.answer(greedy("next", text(2), 3))
        assert world.counts.handovers == 1


def test_a_gateway_that_leaves_takes_its_waiting_requests_with_it(folder: Path) -> None:
    with pair(folder) as (world, giver):
        with connected(world.endpoint) as other:
            other.hello()
            other.send(Submit(replace(greedy("r", text(1, 1000), 5), handover=world.source)))
            assert eventually(lambda: world.counts.waiting == 1)
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


def test_between_machines_the_connection_is_encrypted_and_strangers_get_nothing(folder: Path, alone: Engine) -> None:
    """The decoding engine's key must be among those that the other one admits."""
    (public, secret), (known_public, known), (_, stranger) = (generate_keypair() for _ in range(3))
    giver = make_engine(folder, role="prefill")
    with serving(giver, curve=CurveServer(secret, [known_public])) as running:
        for key, handovers in ((known, 1), (stranger, 0), ("", 0), ("nonsense", 0)):
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
                for delta in world.client.deltas(60):
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
