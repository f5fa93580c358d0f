"""`examples/70b-eight-gpus.yaml`: it is valid, and its topology runs with tiny models on eight processes (R-ENG-10).

Eight ranks, a draft model, adapters of two tenants, fp8 KV cache, prefix cache and host tier at once; a rank is killed
under streams, every stream goes on, and the ledger has exactly what the clients were told (R-ENG-18).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from penstock.cli.app import app
from tests.e2e.test_failover import lines
from tests.e2e.test_parallel import ranks
from tests.e2e.test_supervisor import Server
from tests.engine.adapters.files import write_adapter
from tests.engine.tiny import write_checkpoint
from tests.scripted import make_text

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/70b-eight-gpus.yaml"
TOKENS = 150
TINY = {"vocab_size": 260, "eos_token_id": 256, "max_position_embeddings": 2048, "num_attention_heads": 8}


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def test_the_example_is_what_it_says() -> None:
    assert "ok (llama-70b" in run("config", "--check", str(EXAMPLE))
    example = yaml.safe_load(EXAMPLE.read_text())
    (model,) = example["models"]
    assert (model["tensor_parallel"], model["kv_dtype"], model["speculation"]) == (8, "fp8", "draft")
    assert len(model["adapters"]) == 20 == model["adapter_slots"] and model["adapter_rank"] == 64
    assert [tier["name"] for tier in example["tiers"]] == ["premium", "standard", "batch"]


def tiny_deployment(folder: Path) -> Path:
    """The example with tiny models in place of the large ones; the configuration's path."""
    target, draft = folder / "target", folder / "draft"
    for place, layers in ((target, 3), (draft, 1)):
        place.mkdir()
        make_text(place)
        write_checkpoint("llama-gqa", place, spread=0.5, **TINY, num_hidden_layers=layers)
    example = yaml.safe_load(EXAMPLE.read_text())
    (model,) = example["models"]
    for seed, adapter in enumerate(model["adapters"]):
        adapter["source"] = str(write_adapter(folder / adapter["name"], target, rank=64, seed=seed, size=0.2))
    model |= {"source": str(target), "draft_model": str(draft), "device": "cpu", "threads": 1}
    model |= {"kv_memory": "1MiB", "host_memory": "4MiB", "host_idle_s": 1, "max_model_len": 1024, "max_running": 16}
    model |= {"input_price": 1.0, "output_price": 2.0}
    example |= {"store": {"url": f"sqlite:///{folder / 'ledger.db'}"}, "encoders": []}
    example |= {"generation": {"time_limit_s": 600}}
    # Patience for a slow machine, with streams that have not begun when the rank dies too.
    example |= {"server": {"engine_wait_s": 300}, "resilience": {"resume_s": 300}}
    path = folder / "penstock.yaml"
    path.write_text(yaml.safe_dump(example))
    return path


async def stream(http: httpx.AsyncClient, key: str, model: str, begun: asyncio.Queue[str]) -> dict[str, Any]:
    """The usage of one streamed answer that must come to its end."""
    body = {"model": model, "messages": [{"role": "user", "content": f"Tell {model} a long story."}]}
    body |= {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    usage, ended = None, False
    headers = {"authorization": f"Bearer {key}"}
    async with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in lines(reply):
            if line == b"data: [DONE]":
                ended = True
            elif line.startswith(b"data: "):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                begun.put_nowait(model)
                usage = chunk.get("usage") or usage
    assert ended and usage is not None and usage["completion_tokens"] == TOKENS, (model, usage)
    return {"tenant": model.partition("-")[0], "adapter": model, **usage}


async def under_fire(server: Server, work: list[tuple[str, str]], victim: int) -> list[dict[str, Any]]:
    """All streams, while a rank is killed."""
    begun: asyncio.Queue[str] = asyncio.Queue()
    async with httpx.AsyncClient(base_url=server.url, timeout=400) as http:
        tasks = [asyncio.create_task(stream(http, key, model, begun)) for key, model in work]
        started: dict[str, int] = {}
        while sum(count > 3 for count in started.values()) < 4:
            model = await asyncio.wait_for(begun.get(), 200)
            started[model] = started.get(model, 0) + 1
        assert not any(task.done() for task in tasks), "it must happen in the middle"
        os.kill(victim, signal.SIGKILL)
        return await asyncio.gather(*tasks)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_eight_ranks_with_everything_on_lose_one_and_nothing_else(tmp_path: Path) -> None:
    config = tiny_deployment(tmp_path)
    store = ("-c", str(config))
    keys = {}
    for tenant, tier in (("acme", "premium"), ("globex", "standard")):
        run("tenants", "create", tenant, "--tier", tier, *store)
        keys[tenant] = run("keys", "create", "--tenant", tenant, *store).split()[0]
    work = [(keys[tenant], f"{tenant}-{task}") for tenant in keys for task in ("support", "sales", "legal", "coding")]
    server = Server("-c", str(config), defaults=False)
    try:
        server.wait_for("curl http")
        server.wait_for("up on 8 ranks")
        before = ranks(server.children()["engine"])
        assert len(before) == 7
        told = asyncio.run(under_fire(server, work, before[4]))
        server.wait_for("is gone (killed by SIGKILL)")
        server.wait_for("up on 8 ranks", times=2)
        assert len({answer["adapter"] for answer in told}) == 8
        key = run("keys", "create", "--scope", "metrics", *store).split()[0]
        metrics = httpx.get(f"{server.url}/metrics", headers={"authorization": f"Bearer {key}"}).text
        drafted = re.search(r"^vllm:spec_decode_num_drafts_total{.*} (\S+)$", metrics, re.M)
        assert "penstock_adapter_on_device" in metrics and drafted is not None and float(drafted[1]) > 0, metrics
    finally:
        server.close()
    rows = json.loads(run("usage", "--by", "tenant,adapter", "-o", "json", *store))
    billed = {(row["tenant"], row["adapter"]): row for row in rows}
    for answer in told:
        row = billed[answer["tenant"], answer["adapter"]]
        assert row["completion_tokens"] == TOKENS and row["prompt_tokens"] == answer["prompt_tokens"]
    assert sum(row["completion_tokens"] for row in rows) == TOKENS * len(work)
