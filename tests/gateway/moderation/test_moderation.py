"""Guardrails that ask a model: an endpoint on a real port, a chat model of this server, one of another server."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.backends.remote.server import RemoteServer
from penstock.backends.remote.upstream import Upstream
from penstock.config import load
from penstock.config.cache import CacheConfig
from penstock.config.guardrails import GuardrailConfig
from penstock.config.schema import TierConfig
from penstock.engine.request import Request, StepOutput, TokenLogprob
from penstock.errors import ConfigError
from penstock.gateway.moderation.moderators import yes_share
from penstock.gateway.moderation.rule import OVERLAP, PART, parts_of
from penstock.gateway.process.settings import ModelSettings
from penstock.routing.remotes import RemoteModel
from penstock.text import TextModel
from tests.gateway.conftest import Running, Serving, events, eventually, until
from tests.scripted import ScriptedEngine

EVIL = "poison"
TALK = "A long and friendly story of many words. " * 4
RULE = "harm"


class Endpoint:
    """A server with /v1/moderations: flags what speaks of poison, and keeps all it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.status = 200
        self.free = asyncio.Event()
        self.free.set()
        self.at_once = self.most_at_once = 0
        self.url = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                headers = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
                headers = {name.lower(): value for name, value in headers.items()}
                body = json.loads(await reader.readexactly(int(headers[b"content-length"])))
                self.asked.append(body)
                self.keys.append(headers.get(b"authorization", b"").decode())
                self.at_once += 1
                self.most_at_once = max(self.at_once, self.most_at_once)
                await self.free.wait()
                self.at_once -= 1
                bad = EVIL in body["input"]
                scores = {"violence": 0.8 if bad else 0.1, "spam": 0.6}
                result = {"flagged": bad, "categories": {"violence": bad, "spam": False}, "category_scores": scores}
                said = json.dumps({"results": [result]}).encode()
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (self.status, len(said)) + said)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    @property
    def texts(self) -> list[str]:
        return [body["input"] for body in self.asked]


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    made = Endpoint()
    server = await asyncio.start_server(made.answer, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/moderations"
    yield made
    server.close()


def rule(**more: Any) -> GuardrailConfig:
    return GuardrailConfig(**{"name": RULE, "kind": "model", "stage": "input", "timeout_s": 60.0, **more})


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def said(running: Running, **body: Any) -> tuple[str, str]:
    """What a streamed chat shows, and why it ended."""
    reply = await running.chat(stream=True, **body)
    assert reply.status_code == 200, reply.text
    choices = [json.loads(event)["choices"][0] for event in events(reply.text)[:-1]]
    return "".join(choice["delta"].get("content", "") for choice in choices), choices[-1]["finish_reason"]


async def checks(running: Running, stage: str, outcome: str) -> float:
    return await running.metric(
        f'penstock_moderation_checks_total{{rule="{RULE}",stage="{stage}",outcome="{outcome}"}}'
    )


async def test_refused_input_reaches_no_engine_in_any_api(
    serving: Serving, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MODERATION_KEY", "sesame")
    caplog.set_level(logging.DEBUG, "penstock")
    async with serving(guardrails=(rule(url=endpoint.url, key_env="MODERATION_KEY", model="omni"),)) as running:
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("/v1/chat/completions", {"messages": [*user("hi"), *user(f"make {EVIL}")]}),
            ("/v1/completions", {"prompt": ["fine", f"some {EVIL}"]}),
            ("/v1/responses", {"input": f"{EVIL}!", "store": False}),
            ("/v1/messages", {"messages": user(f"{EVIL}?"), "max_tokens": 5}),
        ]
        for path, body in bodies:
            reply = await running.client.post(path, json={"model": "tiny", **body})
            assert reply.status_code == 400, reply.text
            assert f"`{RULE}`" in reply.json()["error"]["message"]
        assert running.engine.seen == []
        assert await running.metric(f'penstock_guardrails_total{{rule="{RULE}",stage="input",action="refuse"}}') == 4
        assert await checks(running, "input", "flagged") == 4
        assert (await running.chat(messages=user("hello"))).status_code == 200
        assert set(endpoint.keys) == {"Bearer sesame"} and endpoint.asked[0]["model"] == "omni"
        assert EVIL not in caplog.text and "sesame" not in caplog.text


async def test_what_was_found_harmless_is_not_asked_again(serving: Serving, endpoint: Endpoint) -> None:
    async with serving(guardrails=(rule(url=endpoint.url),)) as running:
        talk = user("first")
        for turn in ("second", "third"):
            assert (await running.chat(messages=talk)).status_code == 200
            talk += [{"role": "assistant", "content": "ok"}, *user(turn)]
        await running.chat(messages=talk)
        assert sorted(endpoint.texts) == ["first", "ok", "second", "third"]


async def test_thresholds_and_categories(serving: Serving, endpoint: Endpoint) -> None:
    for given, text, status in (
        ({"threshold": 0.7}, "hi", 200),
        ({"threshold": 0.7}, EVIL, 400),
        ({"threshold": 0.5}, "hi", 400),
        ({"threshold": 0.5, "categories": ("violence",)}, "hi", 200),
        ({"categories": ("spam",)}, EVIL, 200),
        ({"threshold": 0.5, "categories": ("unheard of",)}, "hi", 503),
        ({"tenants": ("other",)}, EVIL, 200),
        ({"tiers": ("free",)}, EVIL, 400),
    ):
        options: dict[str, Any] = {"tiers": (TierConfig(name="free"),), "default_tier": "free"}
        async with serving(guardrails=(rule(url=endpoint.url, **given),), **options) as running:
            assert (await running.chat(messages=user(text))).status_code == status, given


async def test_failures_refuse_or_pass_as_the_rule_says(serving: Serving, endpoint: Endpoint) -> None:
    endpoint.status = 500
    async with serving(guardrails=(rule(url=endpoint.url),)) as running:
        reply = await running.chat()
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "moderation_unavailable")
        assert running.engine.seen == [] and await checks(running, "input", "failed") == 1
    async with serving(guardrails=(rule(url=endpoint.url, on_error="allow", stage="both"),)) as running:
        assert (await said(running))[1] == "stop"
        assert await checks(running, "output", "failed") == 1
    async with serving(guardrails=(rule(url=endpoint.url, stage="output"),)) as running:
        assert await said(running) == ("", "content_filter")
    endpoint.status = 200
    endpoint.free.clear()
    async with serving(guardrails=(rule(url=endpoint.url, timeout_s=0.05),)) as running:
        assert (await running.chat()).status_code == 503
        endpoint.free.set()
        await until(running.chat, lambda reply: reply.status_code == 200)  # it is asked again


async def test_only_so_many_are_asked_at_once(serving: Serving, endpoint: Endpoint) -> None:
    endpoint.free.clear()
    async with serving(guardrails=(rule(url=endpoint.url, concurrency=2),)) as running:
        requests = [asyncio.create_task(running.chat(messages=user(f"{n}"))) for n in range(6)]
        await eventually(lambda: endpoint.at_once == 2)
        await asyncio.sleep(0.05)
        endpoint.free.set()
        assert {reply.status_code for reply in await asyncio.gather(*requests)} == {200}
        assert endpoint.most_at_once == 2 and len(endpoint.asked) == 6


async def whole(running: Running) -> tuple[str, str]:
    choice = (await running.chat(max_tokens=400)).json()["choices"][0]
    return choice["message"]["content"], choice["finish_reason"]


async def response_status(running: Running) -> str:
    body = {"model": "tiny", "input": "hi", "store": False, "max_output_tokens": 400}
    return str((await running.client.post("/v1/responses", json=body)).json()["status"])


async def test_harmless_answers_pass_in_windows(serving: Serving, text: TextModel, endpoint: Endpoint) -> None:
    config = rule(url=endpoint.url, stage="output", window=40)
    async with serving(ScriptedEngine(text, TALK, step_s=0.001), guardrails=(config,)) as running:
        assert await said(running, max_tokens=400) == (TALK, "stop") == await whole(running)
        assert await response_status(running) == "completed"
        assert len(endpoint.asked) > 2
        assert any(len(asked) > 60 for asked in endpoint.texts), "with the end of the window before"


async def test_an_answer_ends_with_the_last_window_that_passed(
    serving: Serving, text: TextModel, endpoint: Endpoint
) -> None:
    engine = ScriptedEngine(text, f"{TALK}Then mix the {EVIL} and {'x' * 200}", step_s=0.001)
    config = rule(url=endpoint.url, stage="output", window=40)
    async with serving(engine, guardrails=(config,)) as running:
        for shown, reason in (await said(running, max_tokens=400), await whole(running)):
            assert reason == "content_filter" and EVIL not in shown
            assert f"{TALK}Then mix the ".startswith(shown) and len(shown) > 40, "what came before was shown"
        await eventually(lambda: len(engine.aborted) == 2)
        assert await running.metric(f'penstock_guardrails_total{{rule="{RULE}",stage="output",action="refuse"}}') == 2
        assert await response_status(running) == "incomplete"
    async with serving(engine, guardrails=(rule(url=endpoint.url, stage="output", window=4000),)) as running:
        assert await said(running, max_tokens=400) == ("", "content_filter"), "all of it in one window"


async def test_nothing_is_shown_while_the_model_thinks_and_choices_are_cut_apart(
    serving: Serving, text: TextModel, endpoint: Endpoint
) -> None:
    answers = iter([EVIL, "harmless"])
    engine = ScriptedEngine(text, lambda request: [*text.encode(next(answers)), text.eos_token_ids[0]])
    endpoint.free.clear()
    settings = {"hold_status_s": 0.02, "keep_alive_s": 0.02}
    async with serving(engine, guardrails=(rule(url=endpoint.url, stage="output"),), **settings) as running:
        body = {"model": "tiny", "messages": user("hi"), "stream": True, "n": 2, "logprobs": True}
        async with running.client.stream("POST", "/v1/chat/completions", json=body) as reply:
            lines = reply.aiter_lines()
            seen = ""
            while "keep-alive" not in seen:
                seen += await anext(lines)
            await eventually(lambda: bool(endpoint.asked))
            assert EVIL not in seen and "harm" not in seen
            endpoint.free.set()
            rest = [json.loads(line[6:]) async for line in lines if line.startswith("data: {")]
        by_choice = {index: [c for chunk in rest for c in chunk["choices"] if c["index"] == index] for index in (0, 1)}
        texts = {k: "".join(c["delta"].get("content", "") for c in found) for k, found in by_choice.items()}
        ends = {k: found[-1]["finish_reason"] for k, found in by_choice.items()}
        assert texts == {0: "", 1: "harmless"} and ends == {0: "content_filter", 1: "stop"}


class Odds(ScriptedEngine):
    """Says hello, and how likely it is that a text is not allowed."""

    def __init__(self, text: TextModel, max_model_len: int = 2048) -> None:
        super().__init__(text, self._reply, max_model_len=max_model_len)
        self.text = text
        self.questions: list[Request] = []

    def _reply(self, request: Request) -> list[int]:
        if request.params.logprobs is None:
            return [*self.text.encode("Hello"), self.text.eos_token_ids[0]]
        self.questions.append(request)
        return self.text.encode("n")

    def step(self) -> StepOutput | None:
        output = super().step()
        yes, no = self.text.encode("y")[0], self.text.encode("n")[0]
        asked = {request.request_id: request for request in self.questions}
        for delta in output.deltas if output else ():
            if delta.logprobs and delta.request_id in asked:
                share = 0.3 if EVIL in self.text.decode(asked[delta.request_id].prompt) else 0.1
                odds = [math.log(share), math.log(1 - share)]
                delta.logprobs = [TokenLogprob(odds[1], [yes, no], odds)]
        return output


async def test_a_chat_model_of_this_server_decides_by_probability_and_costs_nothing(
    serving: Serving, text: TextModel, tmp_path: Path
) -> None:
    engine = Odds(text)
    config = rule(model="small", threshold=0.25, policy="recipes.", stage="both")
    settings = {"store_url": f"sqlite:///{tmp_path / 'p.db'}", "models": (ModelSettings("tiny", "", input_price=9.0),)}
    async with serving(engine, guardrails=(config,), **settings) as running:
        reply = await running.chat(messages=user(f"{EVIL} {{}} please"))
        assert reply.status_code == 400, "0.3 is enough, though its word was no"
        assert (await running.chat(messages=user("hi"))).status_code == 200
        params = engine.questions[0].params
        assert params.grammar and params.max_tokens == 1 and params.temperature == 0
        asked = text.decode(engine.questions[0].prompt)
        assert "Not allowed: recipes.\n" in asked and f"{EVIL} {{}} please" in asked
        usage = (await running.client.get("/v1/usage?by=feature")).json()["data"]
        by_feature = {row["feature"]: row for row in usage}
        assert by_feature["moderation"]["requests"] == 3 and by_feature["moderation"]["completion_tokens"] == 3
        assert float(by_feature["moderation"]["cost"]) == 0 < float(by_feature[""]["cost"])
    async with serving(Odds(text), guardrails=(rule(model="tiny"),)) as running:
        assert (await running.chat(messages=user(EVIL))).status_code == 200, "0.3 is less than half"


async def test_a_text_too_long_for_the_model_is_read_in_parts(serving: Serving, text: TextModel) -> None:
    engine = Odds(text, max_model_len=700)
    async with serving(engine, guardrails=(rule(model="tiny", threshold=0.2, policy="x"),)) as running:
        reply = await running.complete(prompt="a" * 1200 + EVIL + "b" * 300)
        assert reply.status_code == 400 and reply.json()["error"]["code"] == "content_blocked"
        assert len(engine.questions) > 1


async def test_a_model_that_another_server_runs(serving: Serving, text: TextModel) -> None:
    async with serving(Odds(text), time_limit_s=None) as behind:
        upstream = Upstream(f"http://127.0.0.1:{behind.port}/v1", "tiny", timeout_s=60.0)
        remote = RemoteModel("far", [RemoteServer("0", upstream)])
        config = rule(model="far", threshold=0.25)
        async with serving(others=[remote], guardrails=(config,)) as running:
            assert (await running.chat(messages=user(EVIL))).status_code == 400
            assert (await running.chat(messages=user("hi"))).status_code == 200
            assert running.engine.seen[0].params.logprobs is None and len(running.engine.seen) == 1


async def test_answers_of_other_servers_are_cut_too(serving: Serving, text: TextModel, endpoint: Endpoint) -> None:
    engine = ScriptedEngine(text, f"{TALK}Then mix the {EVIL} and {'x' * 200}", step_s=0.002)
    async with serving(engine, time_limit_s=None) as behind:
        upstream = Upstream(f"http://127.0.0.1:{behind.port}/v1", "tiny", timeout_s=60.0)
        remote = RemoteModel("far", [RemoteServer("0", upstream)])
        config = rule(url=endpoint.url, stage="output", window=40)
        async with serving(others=[remote], guardrails=(config,)) as running:
            shown, reason = await said(running, model="far", max_tokens=400)
            assert reason == "content_filter" and TALK.startswith(shown[: len(TALK)]) and EVIL not in shown and shown
            await eventually(lambda: len(engine.aborted) == 1)
            shown, reason = await said(running, model="far", max_tokens=20)
            assert (shown, reason) == (TALK[:20], "length")


async def test_kept_answers_are_judged_and_refused_ones_are_not_kept(
    serving: Serving, text: TextModel, endpoint: Endpoint
) -> None:
    answers = {"bad": EVIL, "good": "harmless"}

    def reply(request: Request) -> list[int]:
        asked = "bad" if "bad" in text.decode(request.prompt) else "good"
        return [*text.encode(answers[asked]), text.eos_token_ids[0]]

    engine = ScriptedEngine(text, reply)
    config = rule(url=endpoint.url, stage="output")
    async with serving(engine, guardrails=(config,), cache=CacheConfig(exact="on")) as running:
        for _ in range(2):
            assert await said(running, messages=user("good"), temperature=0) == ("harmless", "stop")
            assert await said(running, messages=user("bad"), temperature=0) == ("", "content_filter")
            await eventually(lambda: not running.parts.background)
        assert len(engine.seen) == 3, "the good one was kept"
        endpoint.status = 500
        running.parts.guardrails._moderations[0]._harmless.clear()  # type: ignore[union-attr]
        assert await said(running, messages=user("good"), temperature=0) == ("", "content_filter")
        assert len(engine.seen) == 3


async def test_a_client_that_leaves_while_a_check_runs_leaves_nothing_behind(
    serving: Serving, text: TextModel, endpoint: Endpoint
) -> None:
    endpoint.free.clear()
    engine = ScriptedEngine(text, "x" * 300, step_s=0.005)
    config = rule(url=endpoint.url, stage="output", window=10, timeout_s=0.3)
    async with serving(engine, guardrails=(config,), hold_status_s=0.01, keep_alive_s=0.01) as running:
        body = {"model": "tiny", "messages": user("hi"), "stream": True, "max_tokens": 300}
        async with running.client.stream("POST", "/v1/chat/completions", json=body):
            await eventually(lambda: bool(endpoint.asked))
        await eventually(lambda: len(engine.aborted) == 1)
        await eventually(lambda: not any(task.get_name() == "moderation of an answer" for task in asyncio.all_tasks()))


def test_every_character_is_in_a_part_and_borders_overlap() -> None:
    text = "".join(chr(0x4E00 + n) for n in range(3 * PART))
    parts = list(parts_of(text))
    assert parts[0] + "".join(part[OVERLAP:] for part in parts[1:]) == text
    assert all(len(part) <= PART for part in parts) and list(parts_of("  ")) == [] and list(parts_of("a")) == ["a"]


def test_the_share_of_yes() -> None:
    share = yes_share([("Yes", math.log(0.2)), (" y", math.log(0.1)), ("no", math.log(0.3)), ("maybe", 0.0), ("", 0.0)])
    assert share == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("written", "complaint"),
    [
        ("kind: model", "needs a model or a url"),
        ("kind: model, model: nobody", 'there is no model or remote "nobody"'),
        ("kind: model, url: 'ftp://x'", "http://HOST"),
        ("kind: model, url: 'http://'", "http://HOST"),
        ("kind: model, url: 'http://x', action: redact", "redact"),
        ("kind: model, url: 'http://x', words: [a]", "a rule of their own"),
        ("kind: model, url: 'http://x', policy: p", "policy"),
        ("kind: model, model: m, categories: [a]", "only used with url"),
        ("kind: model, url: 'http://x', threshold: 2", "threshold"),
        ("words: [a], model: m", "only used with kind: model"),
        ("kind: oracle, words: [a]", "patterns, model"),
    ],
)
def test_rules_that_cannot_work_are_refused(written: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text(f"models: [{{name: m, source: smollm2-135m}}]\nguardrails: [{{name: a, {written}}}]\n")
    with pytest.raises(ConfigError, match=complaint):
        load(file)


async def test_a_key_that_is_not_there_stops_the_start(serving: Serving) -> None:
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        async with serving(guardrails=(rule(url="http://127.0.0.1:9/", key_env="NO_SUCH_KEY"),)):
            pass
