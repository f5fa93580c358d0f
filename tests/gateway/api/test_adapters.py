"""Adapters over HTTP: a real tiny engine behind a real gateway; listed, selected by name, loaded and unloaded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.gateway.process.gateway import Gateway
from penstock.gateway.process.main import serve
from penstock.gateway.process.settings import GatewaySettings, ModelSettings
from penstock.routing.registry import ModelRegistry, ServedModel
from penstock.sources.adapters import resolve_adapter
from penstock.testing.in_process_backend import InProcessBackend
from penstock.text import TextModel
from penstock.text.adapter_text import AdapterTexts
from penstock.text.vocabulary import grammars_of
from tests.engine.adapters.files import write_adapter
from tests.engine.adapters.virtual_files import write_prefix, write_prompt
from tests.engine.tiny import write_checkpoint
from tests.ports import free_port


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(root / name, base, seed=i, size=0.6) for i, name in enumerate(("one", "two"))}


@asynccontextmanager
async def serving(
    base: Path, text: TextModel, *adapters: AdapterSpec, texts: AdapterTexts | None = None, **engine: Any
) -> AsyncIterator[httpx.AsyncClient]:
    settings = {"device": "cpu", "dtype": "float32", "num_blocks": 64, "threads": 1, **engine}
    config = EngineConfig(model=str(base), adapters=adapters, **settings)
    loaded = Engine.load(config, find_adapter=resolve_adapter, grammars=grammars_of(base))
    port = free_port()
    names = tuple(spec.name for spec in adapters)
    gateway = GatewaySettings(models=(ModelSettings("tiny", ""),), port=port, drain_s=0.2)
    model = ServedModel("tiny", text, InProcessBackend(loaded), aliases=("small",), adapters=names)
    model.adapter_sources, model.adapter_texts = {spec.name: spec.source for spec in adapters}, texts
    stop = asyncio.Event()
    listening: asyncio.Future[Gateway] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(gateway, ModelRegistry([model]), stop, listening.set_result))
    await asyncio.wait((task, listening), return_when=asyncio.FIRST_COMPLETED)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=180) as client:
            yield client
    finally:
        stop.set()
        await task


async def complete(client: httpx.AsyncClient, model: str) -> httpx.Response:
    body = {"model": model, "prompt": [1, 2, 3, 4], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return await client.post("/v1/completions", json={**body, "logprobs": 0})


async def tokens(client: httpx.AsyncClient, model: str) -> list[str]:
    answer = await complete(client, model)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == answer.headers["x-penstock-model"] == model
    found: list[str] = answer.json()["choices"][0]["logprobs"]["tokens"]
    return found


async def test_adapters_are_models(base: Path, text: TextModel, folders: dict[str, Path]) -> None:
    specs = [AdapterSpec(name, str(folder)) for name, folder in folders.items()]
    async with serving(base, text, *specs) as client:
        listed = {entry["id"]: entry for entry in (await client.get("/v1/models")).json()["data"]}
        assert list(listed) == ["tiny", "one", "two"]
        assert listed["one"]["parent"] == listed["one"]["root"] == "tiny" and listed["tiny"]["parent"] is None
        assert (await client.get("/v1/models/two")).json()["id"] == "two"
        answers = [tuple(await tokens(client, name)) for name in ("tiny", "one", "two")]
        assert len(set(answers)) == 3
        assert tuple(await tokens(client, "one")) == answers[1]
        metrics = (await client.get("/metrics")).text
        assert 'penstock_adapter_loads_total{model_name="tiny",engine="0"} 2' in metrics
        assert 'max_lora="20",running_lora_adapters="",waiting_lora_adapters=""' in metrics
        assert 'vllm:request_success_total{model_name="tiny",engine="0",finished_reason="length"} 4' in metrics


async def test_load_use_pin_and_unload(base: Path, text: TextModel, folders: dict[str, Path]) -> None:
    async with serving(base, text, adapter_slots=3) as client:
        plain = await tokens(client, "tiny")
        assert (await complete(client, "mine")).status_code == 404
        loaded = await client.post("/v1/admin/adapters", json={"name": "mine", "source": str(folders["one"])})
        assert loaded.status_code == 200 and loaded.json()["state"] == "ready"
        assert (loaded.json()["rank"], loaded.json()["kind"]) == (8, "LoRA")
        first = await tokens(client, "mine")
        assert first != plain
        again = await client.post("/v1/admin/adapters", json={"name": "mine", "source": str(folders["two"])})
        assert again.json()["version"] != loaded.json()["version"]
        assert await tokens(client, "mine") not in (plain, first)
        pinned = await client.patch("/v1/admin/adapters/mine", json={"pinned": True})
        assert pinned.json()["pinned"] and (await client.get("/v1/admin/adapters")).json()["data"][0]["pinned"]
        assert (await client.delete("/v1/admin/adapters/mine")).json()["deleted"]
        assert (await complete(client, "mine")).json()["error"]["code"] == "model_not_found"
        assert (await client.delete("/v1/admin/adapters/mine")).status_code == 404
        # The same as the official SDK asks for it; models are no adapters.
        sdk = openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0)
        assert (
            await client.post("/v1/admin/adapters", json={"name": "mine", "source": str(folders["one"])})
        ).status_code == 200
        gone = await sdk.models.delete("mine")
        assert gone.deleted and gone.id == "mine"
        with pytest.raises(openai.NotFoundError):
            await sdk.models.delete("mine")
        with pytest.raises(openai.BadRequestError, match="no adapter"):
            await sdk.models.delete("tiny")
        assert (await client.get("/v1/admin/adapters")).json()["data"] == []


async def test_mistakes_are_clear(base: Path, text: TextModel, folders: dict[str, Path], tmp_path: Path) -> None:
    large = write_adapter(tmp_path / "large", base, rank=32)
    turned = write_adapter(tmp_path / "turned", base, peft_type="HRA")
    async with serving(base, text, AdapterSpec("large", str(large)), adapter_slots=2, adapter_rank=16) as client:

        async def load(**body: Any) -> tuple[int, str]:
            answer = await client.post("/v1/admin/adapters", json={"source": str(folders["one"]), **body})
            failed = answer.json()["error"]
            assert failed["code"] != "adapter_failed" or failed["param"] == "source"
            return answer.status_code, failed["message"]

        answer = await complete(client, "large")
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "adapter_failed"
        assert answer.json()["error"]["param"] == "model"
        assert "rank 32 is above adapter_rank 16" in answer.json()["error"]["message"]
        assert str(tmp_path) not in answer.text, "clients need not know where it lies"
        state = ""
        for _ in range(6000):  # the engine tells of it a moment after the request has failed
            state = (await client.get("/v1/admin/adapters")).json()["data"][0]["state"]
            if state == "failed":
                break
            await asyncio.sleep(0.01)
        assert state == "failed"
        for body, status, sentence in (
            ({"name": "x", "source": str(tmp_path / "nowhere")}, 400, "There is no adapter folder"),
            ({"name": "x", "source": str(turned)}, 400, "peft_type HRA is not supported"),
            ({"name": "x", "source": str(turned)}, 400, "merge it into the model (peft: merge_and_unload)"),
            ({"name": "tiny"}, 400, "already the name of another model"),
            ({"name": "small"}, 400, "already the name of another model"),
            ({"name": "-"}, 400, "begins with a letter or digit"),
            ({"name": "x", "model": "nobody"}, 404, "does not exist"),
            ({"name": "x", "unknown": 1}, 400, "Unknown parameter"),
        ):
            found = await load(**body)
            assert found[0] == status and sentence in found[1], found
        assert await tokens(client, "tiny")


async def test_engines_without_slots_say_so(base: Path, text: TextModel, folders: dict[str, Path]) -> None:
    async with serving(base, text) as client:
        answer = await client.post("/v1/admin/adapters", json={"name": "one", "source": str(folders["one"])})
        assert answer.status_code == 400 and "set adapter_slots" in answer.json()["error"]["message"]
        assert "penstock_adapter" not in [
            line.split("{")[0] for line in (await client.get("/metrics")).text.split("\n")
        ]


async def test_virtual_tokens_stay_inside(base: Path, text: TextModel, tmp_path: Path) -> None:
    """Usage, echo and limits are of the prompt as it was sent; what does not fit with them is the client's to mend."""
    specs = [AdapterSpec("prefix", str(write_prefix(tmp_path / "prefix", base, "cartridge")))]
    specs.append(AdapterSpec("tuned", str(write_prompt(tmp_path / "tuned", base, "tuned"))))
    body = {"prompt": [1, 2, 3, 4], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    async with serving(base, text, *specs, max_model_len=64) as client:
        for model in ("prefix", "tuned", "tiny"):
            echoed = {**body, "model": model, "echo": True, "logprobs": 1, "n": 2}
            answer = (await client.post("/v1/completions", json=echoed)).json()
            usage = answer["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, 10)
            for choice in answer["choices"]:
                scored = choice["logprobs"]["token_logprobs"]
                assert len(scored) == 9 and [each is None for each in scored] == [True] + 8 * [False]
        for prompt, max_tokens in (([7] * 50, 2), ([7] * 45, 3)):
            long = {**body, "model": "prefix", "prompt": prompt, "max_tokens": max_tokens}
            for stream in (False, True):
                answer = await client.post("/v1/completions", json={**long, "stream": stream})
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (400, "context_length_exceeded"), answer.text
                words = f"prompt is too long: {len(prompt) + 19} tokens > 63 maximum, with the 19 virtual tokens"
                assert error["message"].startswith(words)
            assert (await client.post("/v1/completions", json={**long, "model": "tiny"})).status_code == 200
        fits = {**body, "model": "prefix", "prompt": [7] * 42, "max_tokens": 20}
        choice = (await client.post("/v1/completions", json=fits)).json()
        assert choice["usage"]["completion_tokens"] == 3 and choice["choices"][0]["finish_reason"] == "length"
