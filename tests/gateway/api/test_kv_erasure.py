"""DELETE /v1/admin/kv and `penstock kv erase`: what a tenant left in KV caches is gone, and that of others is not."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.kv.block_hash import block_names, owner_tag
from penstock.engine.loading.random_checkpoint import RandomCheckpoint
from penstock.engine.request import Request, SamplingParams
from penstock.gateway.api.admin.kv import KVEndpoints
from penstock.protocol.errors import InvalidRequest
from penstock.testing.in_process_backend import InProcessBackend
from penstock.text import TextModel
from tests.gateway.conftest import Serving

ASKED = "Whatever was said here belongs to its tenant alone, and to nobody else in the world."


@pytest.fixture
def engine(text: TextModel, tmp_path: Any) -> Iterator[Engine]:
    shape = {
        "model_type": "llama",
        "vocab_size": text.vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    config = EngineConfig(
        model="random", device="cpu", dtype="float32", threads=1, num_blocks=64, max_model_len=512,
        host_memory=1 << 20, disk_memory=1 << 20, disk_path=str(tmp_path),
    )  # fmt: skip
    engine = Engine.load(config, checkpoint=RandomCheckpoint(shape, device=torch.device("cpu"), dtype=torch.float32))
    yield engine
    engine.close()


async def test_what_a_tenant_left_is_erased(serving: Serving, text: TextModel, engine: Engine) -> None:
    async with serving(text=text, backend=InProcessBackend(engine)) as running:  # type: ignore[arg-type]

        async def cached() -> int:
            body = (await running.chat(messages=[{"role": "user", "content": ASKED}], max_tokens=2)).json()
            return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])

        async def erase(**query: str) -> Any:
            reply = await running.client.delete("/v1/admin/kv", params=query)
            return reply.json() if reply.status_code == 200 else reply

        assert await cached() == 0 and await cached() > 0
        other = (await erase(tenant="acme"))["data"]
        assert other == [{"model": "tiny", "replica": other[0]["replica"], "blocks": 0, "failed": 0}]
        assert await cached() > 0
        found = await erase(tenant="", model="tiny")  # callers without a key have no tenant of their own here
        assert found["complete"] and found["data"][0]["blocks"] > 3 and not found["shared"]
        assert await cached() == 0
        (entry,) = (await erase(tenant="default"))["data"]  # to whom callers without a key are charged
        assert entry["blocks"] > 3 and await cached() == 0
        for wrong, param in (
            ({}, "tenant"),
            ({"tenant": "\0"}, "tenant"),
            ({"tenant": "a", "model": "none"}, "model"),
            ({"tenant": "a", "x": "1"}, "x"),
        ):
            reply = await erase(**wrong)
            assert reply.status_code in (400, 404) and reply.json()["error"]["param"] == param, reply.text


def test_caches_of_remote_servers_are_not_erased() -> None:
    endpoints = KVEndpoints(SimpleNamespace(remote=lambda name: name), share_prefixes=False)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="on another server"):
        endpoints._models("theirs")


def test_tenants_with_the_same_tag_share_no_block() -> None:
    one, other = "tenant-40387", "tenant-51778"
    assert owner_tag(one) == owner_tag(other)
    assert not set(block_names(list(range(64)), 16, one)) & set(block_names(list(range(64)), 16, other))


def test_salts_of_one_tenant_have_one_owner(engine: Engine) -> None:
    for salt in ("acme", "acme\0mine", "acme2"):
        engine.submit(Request(salt, list(range(40)), SamplingParams(max_tokens=1), cache_salt=salt))
    while engine.has_work:
        engine.step()
    assert engine.erase("acme").blocks == 4 and engine.erase("acme2").blocks == 2
