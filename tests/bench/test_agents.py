"""`penstock bench agents`: plans, histories, and conversations with a real gateway and a tiny random engine."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from penstock.bench.agents import run, view
from penstock.bench.agents.figures import Goals, figures
from penstock.bench.agents.history import ChatHistory, Histories, TokenHistory
from penstock.bench.agents.load import Agents, Answered, Progress, Tally
from penstock.bench.agents.plan import Growth, plan
from penstock.bench.commands.app import app
from penstock.bench.stream import Answer, AnswerError
from penstock.bench.wire import Target
from penstock.engine.core import Engine
from penstock.errors import PenstockError
from penstock.text import TextModel
from tests.bench.test_serve import engine, server, text  # noqa: F401

QUIET = Console(file=io.StringIO())
SMALL = Growth(turns=3, tokens=200, output_len=8, pause=(0.0, 0.02))


def test_conversations_grow_to_their_length_by_different_steps() -> None:
    growth = Growth()
    conversations = plan(growth, 8)
    for conversation in conversations:
        assert conversation.length == 40_000 and len(conversation.turns) == 20
        before = 0
        for turn in conversation.turns:
            assert turn.prompt_len == before + turn.input_len
            before = turn.prompt_len + turn.output_len
        assert all(2 <= turn.pause_s <= 20 for turn in conversation.turns[1:])
        assert 0 <= conversation.turns[0].pause_s <= 20
        mean = 36_000 / 20
        assert all(mean / 3 < turn.input_len < 3 * mean for turn in conversation.turns)
    assert len({turn.input_len for turn in conversations[0].turns}) > 10
    assert len({conversation.key for conversation in conversations}) == 8
    assert len({conversation.turns for conversation in conversations}) == 8


def test_a_seed_gives_the_same_plan_and_speed_only_shortens_pauses() -> None:
    assert plan(Growth(), 3, 5) == plan(Growth(), 3, 5) != plan(Growth(), 3, 6)
    assert plan(Growth(), 3, 5) == plan(Growth(), 9, 5)[:3]
    fast = plan(Growth(speed=10.0), 1, 5)[0].turns
    for quick, usual in zip(fast, plan(Growth(), 1, 5)[0].turns, strict=True):
        assert quick.pause_s == pytest.approx(usual.pause_s / 10)
        assert replace(quick, pause_s=0.0) == replace(usual, pause_s=0.0)


def test_the_first_prompt_can_be_given_and_impossible_lengths_are_refused() -> None:
    (only,) = plan(Growth(turns=4, tokens=1000, output_len=10, first_len=700), 1)
    assert only.turns[0].prompt_len == 700 and only.length == 1000
    (tight,) = plan(Growth(turns=3, tokens=33, output_len=10), 1)
    assert [turn.input_len for turn in tight.turns] == [1, 1, 1]
    for growth in (
        Growth(turns=3, tokens=32, output_len=10),
        Growth(turns=3, tokens=100, output_len=10, first_len=69),
        Growth(turns=1, tokens=100, output_len=10, first_len=50),
        Growth(pause=(3.0, 2.0)),
    ):
        with pytest.raises(PenstockError):
            plan(growth, 1)
    with pytest.raises(PenstockError, match="larger --first-len"):
        run.AgentsBenchSettings(growth=SMALL, shared_len=150).plan()


def answer(prompt_tokens: int, output_tokens: int, ids: list[int] | None = None, said: str = "") -> Answer:
    return Answer(1.0, 2.0, 2.0, [], prompt_tokens, output_tokens, None, ids or [], said)


def test_a_history_of_tokens_has_the_models_own_ones() -> None:
    conversation = plan(SMALL, 1)[0]
    history = TokenHistory(conversation, 100, [7] * 10)
    first, second, _ = conversation.turns
    asked = list(history.ask(first)["prompt"])
    assert len(asked) == first.prompt_len and asked[:10] == [7] * 10
    history.add(answer(len(asked), 8, list(range(8))))
    later = history.ask(second)["prompt"]
    assert later[: len(asked) + 8] == asked + list(range(8)) and len(later) == second.prompt_len
    with pytest.raises(AnswerError, match="--api chat"):
        history.add(answer(len(later), 8))


def test_a_history_of_messages_corrects_its_length_by_what_the_server_counts() -> None:
    conversation = plan(Growth(turns=6, tokens=6000, output_len=50), 1)[0]
    history = Histories("chat", 100, 200, 0).new(conversation)
    assert isinstance(history, ChatHistory)
    length, messages = 0, []
    for turn in conversation.turns:
        messages = history.ask(turn)["messages"]
        new = messages[-1] if length else {"content": " ".join(message["content"] for message in messages)}
        length += 3 * len(new["content"].split()) + 9  # a poor tokenizer, and a template
        history.add(answer(length, 50, said="Yes."))
        length += 50
    assert [message["role"] for message in messages] == ["system", *["user", "assistant"] * 6]
    assert length == pytest.approx(6000, rel=0.02)


async def test_later_turns_find_their_history_in_the_cache(engine: Engine, text: TextModel) -> None:  # noqa: F811
    settings = run.AgentsBenchSettings(concurrency=2, growth=SMALL, vocab_size=text.vocab_size, seed=41)
    async with server(engine, text) as url:
        name, tally = await run.measure(replace(settings, url=url), None, QUIET)
    results = figures(tally, 3)
    assert name == "tiny" and not tally.errors
    assert (results["succeeded"], results["failed"], results["lost"]) == (6, 0, 0)
    assert results["output_tokens"] == 2 * 3 * 8
    planned = [turn.prompt_len for conversation in settings.plan() for turn in conversation.turns]
    assert results["prompt_tokens"] == sum(planned)
    # All whole blocks (of 16) of what the turn before had read or generated, except the last token's.
    assert [turn.cached_tokens for turn in tally.turns] == [
        max(0, turn.history_tokens - 1) // 16 * 16 for turn in tally.turns
    ]
    assert results["first_turns_cached_share"] == 0.0 and results["cached_share_of_history"] > 0.8
    assert results["cached_share"] < results["history_share"]
    assert [row["succeeded"] for row in results["turns"]] == [2, 2, 2]
    for row in results["turns"]:
        assert 0 < row["ttft_s"]["p50"] <= row["ttft_s"]["p99"] < tally.seconds
    assert results["latency_s"]["TTFT, first turns"]["p50"] > 0 < results["latency_s"]["TTFT, later turns"]["p50"]
    assert not run.warnings(settings, results)


async def test_chat_messages_with_a_shared_beginning(engine: Engine, text: TextModel) -> None:  # noqa: F811
    growth = Growth(turns=2, tokens=230, output_len=4, first_len=30, pause=(0.0, 0.0))
    settings = run.AgentsBenchSettings(concurrency=1, conversations=2, growth=growth, shared_len=12, api="chat")
    async with server(engine, text) as url:
        _, tally = await run.measure(replace(settings, url=url, warm_up=0), None, QUIET)
    assert not tally.errors
    (fresh, later), (shared, _) = tally.turns[:2], tally.turns[2:]
    # Every byte is a token of this tokenizer: the first prompt is longer than planned, and the second adds less.
    assert fresh.prompt_tokens > 60 and later.prompt_tokens == pytest.approx(226, abs=25)
    assert fresh.cached_tokens == 0 and later.cached_tokens and later.cached_tokens >= fresh.prompt_tokens // 16 * 16
    assert shared.cached_tokens and 16 <= shared.cached_tokens < fresh.prompt_tokens


@asynccontextmanager
async def scripted(*replies: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that gives each reply once, in order, the last one again and again; and what it was sent."""
    seen: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
        seen.append(head + await reader.readexactly(length))
        writer.write(replies[min(len(seen), len(replies)) - 1])
        await writer.drain()
        writer.close()

    listener = await asyncio.start_server(talk, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", seen
    finally:
        listener.close()


def streamed(*events: dict[str, Any]) -> bytes:
    body = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n"
    return b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body


async def test_a_failed_turn_ends_its_conversation_and_the_session_is_named() -> None:
    usage = {"prompt_tokens": 56, "completion_tokens": 8}
    good = streamed({"choices": [{"text": "a", "token_ids": [*range(8)]}]}, {"choices": [], "usage": usage})
    refusal = b'{"error": {"message": "full", "code": "no"}}'
    bad = b"HTTP/1.1 503 Busy\r\nContent-Length: %d\r\n\r\n%b" % (len(refusal), refusal)
    conversations = plan(SMALL, 1)
    told: list[int] = []
    prompts: list[list[int]] = []
    async with scripted(good, bad) as (url, seen):
        agents = Agents(Target.parse(url), "m", Histories("completions", 50, 0, 0), session_header="x-session")
        tally = await agents.run(conversations, 4, lambda progress: told.append(progress.done))
    assert tally.errors == {"HTTP 503 no: full": 1} and tally.lost == 1 and told[-1] == 3
    (first,) = tally.turns
    assert (first.turn, first.prompt_tokens, first.cached_tokens) == (0, 56, None)
    for sent in seen:
        head, _, body = sent.partition(b"\r\n\r\n")
        asked = json.loads(body)
        assert b"x-session: bench-agents-0-0" in head and asked["prompt_cache_key"] == "bench-agents-0-0"
        assert asked["max_tokens"] == 8 and asked["ignore_eos"] and asked["return_token_ids"]
        prompts.append(asked["prompt"])
    assert [len(prompt) for prompt in prompts] == [turn.prompt_len for turn in conversations[0].turns[:2]]
    assert prompts[1][: len(prompts[0]) + 8] == [*prompts[0], *range(8)]


@pytest.mark.slow
async def test_a_run_that_is_ended_early_answers_what_was_sent_and_reports_it(
    engine: Engine,  # noqa: F811
    text: TextModel,  # noqa: F811
) -> None:
    growth = replace(SMALL, pause=(1.0, 30.0), turns=3)
    settings = run.AgentsBenchSettings(
        concurrency=2, conversations=4, growth=growth, vocab_size=text.vocab_size, seconds=1.5, warm_up=0, seed=44
    )
    said = Console(file=io.StringIO(), width=200)
    async with server(engine, text) as url:
        _, tally = await run.measure(replace(settings, url=url), None, said)
    results = figures(tally, 3)
    assert not tally.errors and tally.unsent > 8
    assert results["succeeded"] + results["unsent"] == 12 and results["lost"] == 0
    assert "ended before their time" in run.warnings(settings, results)[-1]
    assert "tools alone take" in run.forecast(settings, settings.plan())


async def test_a_signal_ends_a_run_and_the_next_one_the_program() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with run._ended_early(None) as over:
        assert signal.getsignal(signal.SIGTERM) is not before[signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(over.wait(), 60)
        assert {number: signal.getsignal(number) for number in before} == before, "whichever comes next"
    assert {number: signal.getsignal(number) for number in before} == before


def test_goals_are_met_or_missed_and_a_log_says_how_far_a_run_is() -> None:
    turns = [Answered(0, 0.0, 0.1, 0.2, 50, 0, 0, 8), Answered(1, 1.0, 1.05, 1.3, 100, 58, 56, 8)]
    tally = Tally(turns=turns, seconds=2.0)
    results = figures(tally, 2)
    assert [str(verdict) for verdict in Goals(0.95, 80).verdicts(results)] == [
        "met: 96.6% of the history from the cache, goal at least 95.0%",
        "met: TTFT p50 of later turns 50.0 ms, goal at most 80 ms",
    ]
    assert [verdict.met for verdict in Goals(0.97, 40).verdicts(results)] == [False, False]
    assert [verdict.met for verdict in Goals(0.5, 40).verdicts(figures(Tally(seconds=1.0), 2))] == [False, False]
    assert Goals().verdicts(results) == []
    line = view.so_far(Progress(lambda progress: None, done=2, tally=tally), 6)
    assert line.startswith("2 of 6 turns after ") and "p50 of later turns 50 ms, 96.6% of the history" in line
    assert "turns after" in view.so_far(Progress(lambda progress: None), 6)
    assert "met: 96.6%" in view.render("t", results, [], Goals(0.95).verdicts(results))


def test_the_page_and_the_notes_say_what_is_unknown_or_flattered() -> None:
    settings = run.AgentsBenchSettings(growth=SMALL)

    def made(cached: int | None, first_cached: int | None) -> dict[str, Any]:
        turns = [Answered(0, 0.0, 0.1, 0.2, 50, 0, first_cached, 8), Answered(1, 1.0, 1.1, 1.3, 100, 58, cached, 8)]
        return figures(Tally(turns=turns, seconds=2.0), 3)

    silent = made(None, None)
    assert silent["cached_share"] is None and "does not say" in run.warnings(settings, silent)[0]
    assert "same seed" in run.warnings(settings, made(48, 48))[0]
    chat = replace(settings, api="chat")
    assert "same seed" in run.warnings(chat, made(48, 48))[0]
    assert not run.warnings(chat, made(48, 16)), "the beginning of the chat template"
    known = made(48, 0)
    assert (known["cached_share"], known["cached_share_of_history"]) == (48 / 150, 48 / 58)
    assert known["turns"][2] == {
        "turn": 3, "succeeded": 0, "prompt_tokens": None, "ttft_s": None, "cached_share": None, "history_share": 0.0
    }  # fmt: skip
    page = view.render("<title>", known, ["a note"])
    assert "Turn by turn" in page and "&lt;title&gt;" in page and "from the cache" in page and "82.8%" in page
    assert "from the cache" not in view.render("t", silent, [])


async def test_the_command_prints_tables_and_writes_files(
    engine: Engine,  # noqa: F811
    text: TextModel,  # noqa: F811
    tmp_path: Path,
) -> None:
    found, page = tmp_path / "result.json", tmp_path / "page.html"
    arguments = ["agents", "-c", "2", "--turns", "3", "--tokens", "150", "--output-len", "5", "--pause", "0.1", "0.2"]
    arguments += ["--speed", "10", "--seed", "43", "--vocab-size", str(text.vocab_size)]
    async with server(engine, text) as url:
        command = [*arguments, "--url", url, "--json", str(found), "--html", str(page)]
        result = await asyncio.to_thread(CliRunner().invoke, app, command)
        too_long = await asyncio.to_thread(CliRunner().invoke, app, ["agents", "--url", url])
    assert result.exit_code == 0, result.output
    for word in ("TTFT, first turns", "TTFT, later turns", "From the cache", "6 turns succeeded, 0 failed"):
        assert word in result.output
    document = json.loads(found.read_text())
    assert document["benchmark"] == "agents" and len(document["results"]["turns"]) == 3
    assert "<svg" in page.read_text()
    assert too_long.exit_code != 0 and "context window of tiny is 256 tokens" in too_long.output
    for wrong in (["--url", "x", "--serve"], ["--device", "cpu"], ["--set", "a=b"], ["-m", "x", "--shape", "y"]):
        assert CliRunner().invoke(app, ["agents", *wrong]).exit_code == 2


@pytest.mark.slow
def test_a_server_is_started_for_the_run(default_model: Path, tmp_path: Path) -> None:
    found = tmp_path / "result.json"
    command = [sys.executable, "-m", "penstock", "bench", "agents", "--serve", "-m", str(default_model), "-c", "2"]
    command += ["--turns", "3", "--tokens", "300", "--output-len", "8", "--pause", "0.1", "0.2", "--warm-up", "1"]
    command += ["--device", "cpu", "--set", "models.0.host_memory=64MiB", "--json", str(found)]
    subprocess.run(command, check=True, timeout=600, env=os.environ.copy())
    results = json.loads(found.read_text())["results"]
    assert results["succeeded"] == 6 and not results["errors"]
    assert results["cached_share_of_history"] > 0.8
