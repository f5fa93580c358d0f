"""A request with a target for the gap between tokens does not go to a replica that is slower."""

from __future__ import annotations

from typing import Any

from penstock.routing.replicas import ReplicaSet
from penstock.testing.in_process_backend import InProcessBackend
from penstock.text import TextModel
from tests.gateway.conftest import Serving, eventually
from tests.scripted import ScriptedEngine

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


async def test_a_replica_that_is_slower_per_token_is_not_used(serving: Serving, text: TextModel) -> None:
    engine = ScriptedEngine(text, "word " * 400, step_s=0.02, max_model_len=4096)
    replica = InProcessBackend(engine)
    async with serving(engine, backend=ReplicaSet("tiny", [replica])) as running:
        post = running.client.post
        fast = await post("/v1/chat/completions", json={**CHAT, "max_tokens": 2}, headers={"x-slo-tpot-ms": "5"})
        assert fast.status_code == 200, "nothing is known of an idle engine"
        async with running.client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as going:
            await anext(going.aiter_lines())
            gap = replica.token_gap
            await eventually(lambda: (gap.seconds(gap._at) or 0) > 0.01)
            late = await post("/v1/chat/completions", json={**CHAT, "max_tokens": 2}, headers={"x-slo-tpot-ms": "5"})
            assert late.status_code == 503 and late.headers["x-penstock-reason"] == "slo_tpot"
            assert "x-slo-tpot-ms" in late.json()["error"]["message"] and "retry-after" in late.headers
            slow = await post("/v1/chat/completions", json={**CHAT, "max_tokens": 2}, headers={"x-slo-tpot-ms": "5000"})
            assert slow.status_code == 200


async def test_a_replica_whose_tokens_were_late_only_because_of_prompts_is_used(
    serving: Serving, text: TextModel
) -> None:
    """Its engine keeps prompts short enough for a request with a target, once that runs."""
    engine = ScriptedEngine(text, "word " * 400, step_s=0.02, max_model_len=4096)
    replica = InProcessBackend(engine)
    gap = replica.token_gap
    body = {**CHAT, "max_tokens": 2}
    async with serving(engine, backend=ReplicaSet("tiny", [replica])) as running:
        post = running.client.post
        for decode_s, status in ((0.004, 503), (0.002, 200)):
            engine.decode_s = decode_s  # the rest of a step goes to prompts
            async with running.client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as going:
                await anext(going.aiter_lines())
                await eventually(
                    lambda: (gap.seconds(gap._at) or 0) > 0.01 and replica.load.decode_s == engine.decode_s
                )
                reply = await post("/v1/chat/completions", json=body, headers={"x-slo-tpot-ms": "5"})
                assert reply.status_code == status
