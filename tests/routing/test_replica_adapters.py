"""Adapters of a model with several replicas, on real tiny engines: on all of them, also on those that come later."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.backends.inprocess import InProcessBackend
from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.request import Request, SamplingParams
from penstock.protocol.errors import InvalidRequest
from penstock.routing import replicas as module
from penstock.routing.replicas import ReplicaSet
from tests.engine.adapters.files import write_adapter
from tests.engine.tiny import write_checkpoint
from tests.gateway.conftest import eventually


def engine(checkpoint: Path, name: str) -> InProcessBackend:
    config = EngineConfig(
        model=str(checkpoint), device="cpu", dtype="float32", threads=1, num_blocks=32, adapter_slots=2, adapter_rank=16
    )
    return InProcessBackend(Engine.load(config), name=name)


async def test_adapters_are_on_every_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EQUIP_S", 0.05)
    checkpoint = write_checkpoint("llama-gqa", tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", checkpoint, seed=1, size=0.6)
    replicas = ReplicaSet("m", [engine(checkpoint, "0"), engine(checkpoint, "1")])
    await replicas.start()
    try:
        status = await replicas.load_adapter(AdapterSpec("mine", str(adapter), pinned=False))
        assert status.name == "mine"
        assert all("mine" in (backend.adapters or ()) for backend in replicas.replicas)
        with pytest.raises(InvalidRequest):
            await replicas.load_adapter(AdapterSpec("gone", str(tmp_path / "nowhere"), pinned=False))

        await replicas.join(engine(checkpoint, "2"))
        await eventually(lambda: "mine" in (replicas.replicas[2].adapters or ()))
        tokens = {}
        for backend in replicas.replicas:
            request = Request(backend.name, [1, 2, 3], SamplingParams(max_tokens=8, temperature=0.0), adapter="mine")
            tokens[backend.name] = [token async for delta in backend.generate(request) for token in delta.tokens]
        assert len(set(map(tuple, tokens.values()))) == 1

        await replicas.unload_adapter("mine")
        await eventually(lambda: not any("mine" in (backend.adapters or ()) for backend in replicas.replicas))
    finally:
        await replicas.close()
