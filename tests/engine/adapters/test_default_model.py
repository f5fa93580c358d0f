"""The real default model with an adapter scores text as the model with the adapter merged into its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.loading.checkpoint import GGUFCheckpoint
from penstock.engine.request import Request, SamplingParams
from tests.engine.adapters.files import write_adapter
from tests.engine.harness import drain


class Merged(GGUFCheckpoint):
    """A GGUF file with an adapter added to its dense tensors."""

    def __init__(self, path: Path, adapter: Path, scale: float) -> None:
        super().__init__(path)
        self.lora = load_file(adapter / "adapter_model.safetensors")
        self.scale = scale

    def tensor(self, name: str, device: str | torch.device = "cpu") -> torch.Tensor:
        weight = super().tensor(name, device)
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{key}.lora_A.weight" not in self.lora:
            return weight
        product = self.lora[f"{key}.lora_B.weight"] @ self.lora[f"{key}.lora_A.weight"]
        changed = weight + self.scale * product.to(device)
        if (magnitude := self.lora.get(f"{key}.lora_magnitude_vector")) is not None:
            changed = changed * (magnitude.to(device) / changed.norm(dim=1)).unsqueeze(1)
        return changed


def score(engine: Engine, adapter: str) -> torch.Tensor:
    prompt = [(7 * i * i + 11 * i) % 49152 for i in range(60)]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    engine.submit(Request(f"score {adapter}", prompt, params, adapter=adapter))
    found = next(delta.prompt_logprobs for delta in drain(engine) if delta.prompt_logprobs is not None)
    return torch.tensor([entry.logprob for entry in found if entry is not None])


def write_dora(folder: Path, base: Path) -> Path:
    adapter, stored = write_adapter(folder, base, rank=8, alpha=16, size=0.08), GGUFCheckpoint(base)
    file, config = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    tensors = load_file(file)
    for key in [key for key in tensors if key.endswith(".lora_A.weight")]:
        module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        lengths = stored.tensor(f"{module}.weight").norm(dim=1)
        times = 1 + 0.1 * torch.randn(len(lengths), generator=torch.Generator().manual_seed(3))
        tensors[f"base_model.model.{module}.lora_magnitude_vector"] = lengths * times
    save_file(tensors, file)
    config.write_text(json.dumps({**json.loads(config.read_text()), "use_dora": True}))
    return adapter


@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_on_the_default_model_equals_merging_it(default_model: Path, tmp_path: Path, dora: bool) -> None:
    if dora:
        adapter = write_dora(tmp_path / "a", default_model)
    else:
        adapter = write_adapter(tmp_path / "a", default_model, rank=8, alpha=16, size=0.08)
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "weights": "dense", "num_blocks": 32}
    config = EngineConfig(str(default_model), adapters=(AdapterSpec("a", str(adapter)),), **settings)
    engine = Engine.load(config)
    plain, adapted = score(engine, ""), score(engine, "a")
    del engine
    merged = score(
        Engine.load(EngineConfig(str(default_model), **settings), checkpoint=Merged(default_model, adapter, 2.0)), ""
    )
    assert float((adapted - merged).abs().max()) < 2e-3
    assert float((adapted - plain).abs().mean()) > 0.05, "the adapter makes no difference"
