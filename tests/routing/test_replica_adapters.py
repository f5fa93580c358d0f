"""Adapters of a model with several replicas, on real tiny engines: on all of them, also on those that come later."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.request import Request, SamplingParams
from penstock.protocol.errors import InvalidRequest
from penstock.routing import replicas as module
from penstock.routing.replicas import ReplicaSet
from penstock.testing.in_process_backend import InProcessBackend
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
    replicas = ReplicaSet("m", [engine(checkpoint, "0")])
    await replicas.start()
    try:
        assert (await replicas.load_adapter(AdapterSpec("early", str(adapter), pinned=False))).name == "early"
        await replicas.join(engine(checkpoint, "1"))
        await eventually(lambda: "early" in (replicas.replicas[1].adapters or ()))
        await replicas.load_adapter(AdapterSpec("late", str(adapter), pinned=False))
        assert all("late" in (backend.adapters or ()) for backend in replicas.replicas)
        with pytest.raises(InvalidRequest):
            await replicas.load_adapter(AdapterSpec("gone", str(tmp_path / "nowhere"), pinned=False))

        said = []
        for backend in replicas.replicas:
            asked = Request(backend.name, [1, 2, 3], SamplingParams(max_tokens=8, temperature=0.0), adapter="early")
            said.append([token async for delta in backend.generate(asked) for token in delta.tokens])
        assert said[0] == said[1] and len(said[0]) == 8

        await replicas.unload_adapter("early")
        await eventually(lambda: not any("early" in (backend.adapters or ()) for backend in replicas.replicas))
    finally:
        await replicas.close()
