"""LoRA adapters in GGUF files give what the same adapter gives as PEFT saves it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from penstock.engine.adapters.spec import AdapterSpec
from tests.engine.adapters.files import write_adapter
from tests.engine.adapters.test_end_rows import failure
from tests.engine.adapters.test_equals_merging import ask, prompts
from tests.engine.harness import generate, make_engine
from tests.engine.loading.gguf_files import write_gguf
from tests.engine.tiny import write_checkpoint

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def convert(
    adapter: Path, base: Path, folder: Path, *, arch: str = "llama",
    kind: gguf.GGMLQuantizationType | None = None, more: dict[str, np.ndarray] | None = None, **metadata: Any,
) -> Path:  # fmt: skip
    """As llama.cpp's converter does: rows of queries and keys of Llama in pairs."""
    model = json.loads((base / "config.json").read_text())
    config = json.loads((adapter / "adapter_config.json").read_text())
    heads = {"attn_q": model["num_attention_heads"], "attn_k": model["num_key_value_heads"]} if arch == "llama" else {}
    tensors: dict[str, np.ndarray] = {}
    for key, tensor in load_file(adapter / "adapter_model.safetensors").items():
        found = re.fullmatch(r"base_model\.model\.model\.layers\.(\d+)\.(.+)\.lora_([AB])\.weight", key)
        assert found is not None
        name = NAMES[found[2]]
        if found[3] == "B" and name in heads:
            rows = tensor.reshape(heads[name], 2, -1, tensor.shape[1])
            tensor = np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(tensor.shape)
        tensors[f"blk.{found[1]}.{name}.weight.lora_{found[3].lower()}"] = tensor
    folder.mkdir()
    keys = {
        "general.architecture": arch, "general.type": "adapter", "adapter.type": "lora",
        "adapter.lora.alpha": float(config["lora_alpha"]),
    }  # fmt: skip
    quantized = {name: kind for name in tensors if name.endswith("lora_a")} if kind is not None else {}
    write_gguf(folder / "adapter.gguf", {**keys, **metadata}, tensors | (more or {}), quantized)
    return folder


@pytest.mark.parametrize(("family", "arch"), [("llama-gqa", "llama"), ("qwen2-bias", "qwen2")])
def test_answers_are_those_of_the_folder(tmp_path: Path, family: str, arch: str) -> None:
    base = write_checkpoint(family, tmp_path / "base")
    folder = write_adapter(tmp_path / "peft", base, rank=4)
    file = convert(folder, base, tmp_path / "file", arch=arch)
    specs = (AdapterSpec("folder", str(folder)), AdapterSpec("file", str(file)))
    engine, prompt = make_engine(base, adapters=specs), prompts(1)[0]
    got = generate(engine, *(ask(name, prompt, name, 8) for name in ("folder", "file")), ask("base", prompt, "", 8))
    assert got["file"] == got["folder"] != got["base"]


def test_quantized_matrices_are_read(tmp_path: Path) -> None:
    base = write_checkpoint("llama-gqa", tmp_path / "base")
    folder = write_adapter(tmp_path / "peft", base, rank=4, targets=("q_proj", "v_proj"))
    file = convert(folder, base, tmp_path / "file", kind=gguf.GGMLQuantizationType.Q8_0)
    engine, prompt = make_engine(base, adapters=(AdapterSpec("file", str(file)),)), prompts(1)[0]
    got = generate(engine, ask("file", prompt, "file", 8), ask("base", prompt, "", 8))
    assert got["file"] and got["file"] != got["base"]


def test_what_cannot_be_applied_is_refused(tmp_path: Path) -> None:
    base = write_checkpoint("llama-gqa", tmp_path / "base")
    folder = write_adapter(tmp_path / "peft", base, rank=4, targets=("q_proj",))
    for number, (settings, words) in enumerate(
        (
            ({"arch": "qwen2"}, "is an adapter of 'qwen2' models"),
            ({"general.type": "model"}, "is no LoRA adapter"),
            ({"adapter.lora.alpha": 0.0}, "adapter.lora.alpha must be a number other than 0"),
            ({"adapter.alora.invocation_tokens": [1, 2]}, "activated LoRA"),
            ({"more": {"token_embd.weight.lora_a": np.ones((4, 8), np.float32)}}, "cannot apply 'token_embd.weight"),
            ({"more": {"blk.0.attn_v.weight.lora_a": np.ones((4, 64), np.float32)}}, "has no lora_B"),
        )
    ):
        assert words in failure(base, convert(folder, base, tmp_path / f"file {number}", **settings)), words
    large = convert(write_adapter(tmp_path / "large", base, rank=20, targets=("q_proj",)), base, tmp_path / "of 20")
    said = failure(base, large, adapter_rank=16)
    assert "adapter.gguf: rank 20 is above adapter_rank 16; raise adapter_rank" in said and "becomes" not in said
