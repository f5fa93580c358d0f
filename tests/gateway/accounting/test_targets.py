"""Latency targets in headers: the one for the gap between tokens reaches the engine, and nonsense is refused."""

from __future__ import annotations

import pytest

from penstock.text import TextModel
from tests.gateway.conftest import Serving
from tests.scripted import ScriptedEngine

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
MESSAGE = {**CHAT, "max_tokens": 4}
PATHS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "tiny", "prompt": "x"},
    "/v1/responses": {"model": "tiny", "input": "x"},
    "/v1/messages": MESSAGE,
}


@pytest.mark.parametrize("path", PATHS)
async def test_the_gap_target_of_a_request_reaches_the_engine(serving: Serving, text: TextModel, path: str) -> None:
    engine = ScriptedEngine(text)
    async with serving(engine) as running:
        answered = await running.client.post(path, json=PATHS[path], headers={"x-slo-tpot-ms": "25"})
        assert answered.status_code == 200
        assert [request.target_gap_s for request in engine.seen] == [0.025]
        assert (await running.client.post(path, json=PATHS[path])).status_code == 200
        assert engine.seen[-1].target_gap_s is None


@pytest.mark.parametrize("path", PATHS)
async def test_what_is_left_of_the_first_tokens_target_goes_with_the_request(
    serving: Serving, text: TextModel, path: str
) -> None:
    engine = ScriptedEngine(text)
    async with serving(engine) as running:
        for headers in ({"x-slo-ttft-ms": "900000"}, {}):
            assert (await running.client.post(path, json=PATHS[path], headers=headers)).status_code == 200
        first, second = (request.patience_s for request in engine.seen)
        assert first is not None and 0 < first < 900 and second is None


async def test_only_the_first_of_several_choices_must_begin_in_time(serving: Serving, text: TextModel) -> None:
    engine = ScriptedEngine(text)
    async with serving(engine) as running:
        sent = {**CHAT, "n": 3}
        reply = await running.client.post("/v1/chat/completions", json=sent, headers={"x-slo-ttft-ms": "900000"})
        assert reply.status_code == 200
        first, *others = (request.patience_s for request in engine.seen)
        assert first is not None and others == [None, None]


@pytest.mark.parametrize("sent", ["soon", "0", "-5", "inf", "nan", "", "1_000"])
async def test_what_is_no_target_is_refused(serving: Serving, text: TextModel, sent: str) -> None:
    engine = ScriptedEngine(text)
    async with serving(engine) as running:
        refused = await running.client.post("/v1/chat/completions", json=CHAT, headers={"x-slo-tpot-ms": sent})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "x-slo-tpot-ms"
        assert not engine.seen


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/tokenize", {"prompt": "x"}),
        ("/v1/detokenize", {"tokens": [5]}),
        ("/v1/messages/count_tokens", {"messages": CHAT["messages"]}),
        ("/v1/responses/input_tokens", {"input": "x"}),
    ],
)
async def test_what_waits_for_no_engine_names_them_as_ignored(
    serving: Serving, path: str, body: dict[str, object]
) -> None:
    async with serving() as running:
        sent = {"model": "tiny", **body}
        named = await running.client.post(path, json=sent, headers={"x-slo-ttft-ms": "9", "x-slo-tpot-ms": "9"})
        assert named.status_code == 200 and named.headers["x-penstock-ignored"] == "x-slo-ttft-ms, x-slo-tpot-ms"
        refused = await running.client.post(path, json=sent, headers={"x-slo-ttft-ms": "soon"})
        assert refused.status_code == 400 and "x-slo-ttft-ms" in refused.text
