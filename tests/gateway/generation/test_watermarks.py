"""Which answers are watermarked, and the detector of the API (R-ENG-13)."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.config.schema import TierConfig
from penstock.config.watermark import WatermarkConfig
from penstock.engine.noise import uniforms
from penstock.engine.request import Request
from penstock.engine.watermark import WatermarkState
from penstock.errors import ConfigError
from penstock.identity.watermark import WatermarkKeys, write_secret
from penstock.text import TextModel
from tests.gateway.accounting.test_quotas import settings, sign_in
from tests.gateway.conftest import Running, Serving
from tests.scripted import ScriptedEngine

LETTERS = "abcdefghijklmnopqrstuvwxyz "


def sampled(request: Request, letters: list[int]) -> list[int]:
    """What an engine with a uniform choice between letters generates."""
    import numpy as np

    params = request.params
    rng = random.Random(params.seed)
    state = WatermarkState(params.watermark, params.seed, len(request.prompt)) if params.watermark else None
    text = list(request.prompt)
    while len(text) < len(request.prompt) + params.max_tokens:
        plain = np.array([rng.getrandbits(62)], np.int64)
        key = plain if state is None else state.keys(text, (), len(text), plain)
        noise = uniforms(np.repeat(key, len(letters)), np.array(letters))
        text.append(letters[int(noise.argmax())])
    return text[len(request.prompt) :]


@pytest.fixture
def secret(tmp_path: Path) -> str:
    write_secret(tmp_path / "watermark.secret")
    return str(tmp_path / "watermark.secret")


@pytest.fixture
def engine(text: TextModel) -> ScriptedEngine:
    letters = text.encode(LETTERS, special=False, add_special_tokens=False)
    return ScriptedEngine(text, lambda request: sampled(request, letters))


def secret_text(file: str) -> str:
    return Path(file).read_text().strip()


def marked(engine: ScriptedEngine) -> bool:
    return bool(engine.seen[-1].params.watermark)


async def detected(running: Running, text: str, **body: Any) -> dict[str, Any]:
    reply = await running.client.post("/v1/watermark/detect", json={"text": text, **body})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


async def test_a_request_asks_for_it_and_only_its_own_tenant_finds_it(
    serving: Serving, tmp_path: Path, secret: str, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    config = settings(tmp_path, TierConfig(name="free"), watermark=WatermarkConfig(secret_file=secret))
    async with serving(engine, **config) as running:
        await sign_in(running)
        acme = running.client.headers["authorization"]
        plain = await running.chat(max_tokens=200)
        assert not marked(engine) and "x-penstock-watermark" not in plain.headers
        asked = await running.chat(max_tokens=200, watermark=True)
        assert marked(engine) and asked.headers["x-penstock-watermark"] == "true"
        words = [reply.json()["choices"][0]["message"]["content"] for reply in (plain, asked)]
        found = [await detected(running, text) for text in words]
        assert [one["verdict"] for one in found] == ["not_detected", "watermarked"]
        assert found[1]["p_value"] < 1e-9 < 0.001 < found[0]["p_value"]
        assert (await detected(running, words[1][40:100]))["verdict"] == "watermarked"
        assert (await detected(running, "short"))["verdict"] == "too_short"
        assert (await detected(running, words[1], threshold=1e-300))["verdict"] == "not_detected"
        key = engine.seen[-1].params.watermark
        running.admin = acme  # type: ignore[attr-defined]
        await sign_in(running, tenant="beta")
        assert (await detected(running, words[1]))["verdict"] == "not_detected", "it is another tenant's"
        assert (await running.chat(watermark=True)).status_code == 200
        assert engine.seen[-1].params.watermark not in (key, b"")
        words_of_secret = secret_text(secret)
        said = caplog.text + asked.text + str(asked.headers) + str(found)
        for text in (key.hex(), repr(key)[2:-1], words_of_secret):
            assert text not in said, "keys are never shown"
        for api, body in (
            ("/v1/responses", {"model": "tiny", "input": "hi"}),
            ("/v1/messages", {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}),
            ("/api/chat", {"model": "tiny", "stream": False, "messages": [{"role": "user", "content": "hi"}]}),
            ("/v1/completions", {"model": "tiny", "prompt": "hi", "stream": True}),
        ):
            reply = await running.client.post(api, json=body, headers={"x-penstock-watermark": "true"})
            assert reply.status_code == 200 and marked(engine), api
            assert reply.headers["x-penstock-watermark"] == "true"


def refused(reply: httpx.Response, *words: str) -> None:
    message = reply.json()["error"]["message"]
    assert reply.status_code == 400 and all(word in message for word in words), reply.text


async def test_what_cannot_be_marked_is_refused_with_the_reason(
    serving: Serving, tmp_path: Path, secret: str, engine: ScriptedEngine
) -> None:
    async with serving(engine, watermark=WatermarkConfig(secret_file=secret)) as running:
        refused(await running.chat(watermark=True, temperature=0), "`temperature` 0", "choice between tokens")
        refused(await running.complete(watermark=True, top_k=1), "`top_k` 1")
        bad = await running.client.post(
            "/v1/chat/completions",
            json={"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
            headers={"x-penstock-watermark": "perhaps"},
        )
        refused(bad, "true or false")
        assert (await running.chat(watermark="yes")).status_code == 400
        assert engine.seen == []
        assert (await running.chat(watermark=True)).status_code == 200, "callers without a key are one tenant"
        for body in ({}, {"text": ""}, {"text": 3}, {"text": "a", "threshold": 0}):
            assert (await running.client.post("/v1/watermark/detect", json=body)).status_code == 400, body
        unknown = await running.client.post("/v1/watermark/detect", json={"text": "a", "model": "nobody"})
        assert unknown.status_code == 404
        long = await running.client.post("/v1/watermark/detect", json={"text": "word " * 20_000})
        assert long.status_code == 400


async def test_without_a_secret(serving: Serving, engine: ScriptedEngine) -> None:
    async with serving(engine) as running:
        refused(await running.chat(watermark=True), "watermark.secret_file")
        assert (await running.chat(watermark=False)).status_code == 200
        reply = await running.client.post("/v1/watermark/detect", json={"text": "hello"})
        refused(reply, "watermark.secret_file")


async def test_tiers_tenants_and_keys_decide(
    serving: Serving, tmp_path: Path, secret: str, engine: ScriptedEngine
) -> None:
    tier = TierConfig(name="free", watermark="default")
    config = settings(tmp_path, tier, watermark=WatermarkConfig(secret_file=secret))
    async with serving(engine, **config) as running:
        await sign_in(running)
        running.admin = running.client.headers["authorization"]  # type: ignore[attr-defined]
        assert (await running.chat()).headers["x-penstock-watermark"] == "true" and marked(engine)
        assert (await running.chat(watermark=False)).status_code == 200 and not marked(engine)
        greedy = await running.chat(temperature=0)
        assert greedy.headers["x-penstock-watermark"] == "false" and not marked(engine), "where it is possible"
        change = {"limits": {"watermark": "always"}}
        assert (await running.client.patch("/v1/admin/tenants/acme", json=change)).status_code == 200
        assert (await running.chat()).status_code == 200 and marked(engine)
        refused(await running.chat(watermark=False), "this tenant", "always")
        refused(await running.chat(temperature=0), "`temperature` 0")
        await sign_in(running, limits={"watermark": "never"})
        assert (await running.chat()).status_code == 200 and not marked(engine)
        refused(await running.chat(watermark=True), "this key", "never")
        wrong = await running.client.patch("/v1/admin/tenants/acme", json={"limits": {"watermark": "maybe"}})
        assert wrong.status_code == 400


def test_secrets(tmp_path: Path, secret: str) -> None:
    keys = WatermarkKeys.read(secret)
    assert keys is not None and WatermarkKeys.read("") is None
    assert Path(secret).stat().st_mode & 0o077 == 0
    assert keys.marking("a") != keys.marking("b") and len(keys.marking("a")) == 32
    assert Path(secret).read_text().strip() not in repr(keys)
    newer = tmp_path / "newer"
    newer.write_text("x" * 40 + "\n" + Path(secret).read_text())
    both = WatermarkKeys.read(str(newer))
    assert both is not None and both.marking("a") != keys.marking("a") == both.detecting("a")[1]
    for content in ("", "short\n"):
        newer.write_text(content)
        with pytest.raises(ConfigError, match="at least 32 characters"):
            WatermarkKeys.read(str(newer))
    with pytest.raises(ConfigError, match="No such file"):
        WatermarkKeys.read(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="exists"):
        write_secret(Path(secret))
