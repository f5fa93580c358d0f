"""Random PEFT adapters, and the checkpoint that results from merging one into its base."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from penstock.engine.loading.checkpoint import GGUFCheckpoint

MODULES = {
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}
ALL = tuple(MODULES)


@cache
def shapes(base: Path) -> dict[str, list[int]]:
    if base.is_file():
        gguf = GGUFCheckpoint(base)
        return {name: list(gguf.raw(name).shape) for name in gguf.names()}
    with safe_open(base / "model.safetensors", framework="pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def write_adapter(
    folder: Path,
    base: Path,
    *,
    rank: int = 8,
    alpha: float = 16,
    targets: Sequence[str] = ALL,
    seed: int = 0,
    size: float = 0.3,
    **config: Any,
) -> Path:
    """A random adapter for the checkpoint in `base`, as PEFT saves one."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes(base).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets and name.endswith(".weight"):
            outputs, inputs = shape
            spread = size / math.sqrt(rank)
            a = torch.randn(rank, inputs, generator=generator) * spread
            b = torch.randn(outputs, rank, generator=generator) * spread
            tensors[f"base_model.model.{module}.lora_A.weight"] = a
            tensors[f"base_model.model.{module}.lora_B.weight"] = b
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, **config}))
    return folder


def merge(base: Path, adapter: Path, folder: Path) -> Path:
    """A checkpoint with W + scale * B A in place of W."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in base.glob("*.json"):
        shutil.copy(file, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    weights, lora = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in list(weights):
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{key}.lora_A.weight" in lora:
            weights[name] = weights[name] + scale * lora[f"{key}.lora_B.weight"] @ lora[f"{key}.lora_A.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
