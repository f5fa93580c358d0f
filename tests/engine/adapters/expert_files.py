"""Random PEFT adapters of experts, and what they make of a model, by PEFT's own definition.

PEFT keeps for a stacked parameter with a matrix for each expert A [experts * r, in] and B [out, r * experts], of which
the experts are the slower index in the first and the faster in the second. It nests wrappers: of two parameters of a
module, the one that it wrapped first is under `base_layer`.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

STACKS = ("gate_up_proj", "up_proj", "down_proj")
TRANSPOSED = ("GptOssExperts",)
"""Modules that tell PEFT that their matrices are [in, out]."""


def write_expert_adapter(
    folder: Path,
    model: Any,
    *,
    rank: int = 4,
    alpha: float = 8,
    targets: tuple[str, ...] = ("gate_up_proj", "down_proj"),
    fused_rank: int = 1,
    seed: int = 0,
    size: float = 0.3,
    split: bool = False,
    experts_at: str = "",
    **config: Any,
) -> Path:
    """`targets`: last parts of names: of linears, of routers (`gate`, `router`) and of stacks. `fused_rank`: how many
    times the rank `gate_up_proj` has, as PEFT does where it was asked for gate and up. `split`: matrices for each
    expert, as older releases have, below `experts_at`."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = torch.Generator().manual_seed(seed)

    def pair(inputs: int, outputs: int, rank: int, count: int = 1) -> tuple[Tensor, Tensor]:
        spread = size / math.sqrt(rank)
        return (
            torch.randn(count * rank, inputs, generator=draw) * spread,
            torch.randn(outputs, count * rank, generator=draw) * spread,
        )

    tensors: dict[str, Tensor] = {}
    named = dict(model.named_parameters())
    modules, parameters = set(), set()
    for name, parameter in named.items():
        module, _, leaf = name.rpartition(".")
        if leaf in STACKS and leaf in targets and parameter.dim() == 3:
            parameters.add(f"experts.{leaf}")
            count, rows, columns = parameter.shape
            inputs, outputs = (columns, rows)
            if type(model.get_submodule(module)).__name__ in TRANSPOSED:
                inputs, outputs = outputs, inputs
            if split:
                _write_split(tensors, module, leaf, pair, rank, count, inputs, outputs, experts_at)
                continue
            r = rank * (fused_rank if leaf == "gate_up_proj" else 1)
            nested = ".base_layer" if leaf != "down_proj" and "down_proj" in targets else ""
            a, b = pair(inputs, outputs, r, count)
            at = f"base_model.model.{module}{nested}"
            tensors[f"{at}.lora_A.weight"], tensors[f"{at}.lora_B.weight"] = a, b
        elif leaf == "weight" and parameter.dim() == 2 and module.rpartition(".")[2] in targets:
            a, b = pair(parameter.shape[1], parameter.shape[0], rank)
            tensors[f"base_model.model.{module}.lora_A.weight"] = a
            tensors[f"base_model.model.{module}.lora_B.weight"] = b
            linear = isinstance(model.get_submodule(module), torch.nn.Linear)
            (modules if linear else parameters).add(module.rpartition(".")[2] + ("" if linear else ".weight"))
    save_file(tensors, folder / "adapter_model.safetensors")
    patterns: dict[str, Any] = {}
    if fused_rank > 1:
        key = r".*\.gate_up_proj"
        patterns = {"rank_pattern": {key: fused_rank * rank}, "alpha_pattern": {key: fused_rank * alpha}}
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", **patterns}
    settings["target_modules"] = None if split else sorted(modules)
    settings["target_parameters"] = None if split else sorted(parameters)
    (folder / "adapter_config.json").write_text(json.dumps({**settings, **config}))
    return folder


def _write_split(
    tensors: dict[str, Tensor],
    module: str,
    leaf: str,
    pair: Any,
    rank: int,
    count: int,
    inputs: int,
    outputs: int,
    at: str,
) -> None:
    parts = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
    if at == "block_sparse_moe.":
        parts = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[parts[0]], *(("w3",) if len(parts) > 1 else ())
        module = module.replace(".mlp.experts", f".{at}experts")
    for expert in range(count):
        for part in parts:
            a, b = pair(inputs, outputs // len(parts), rank)
            tensors[f"base_model.model.{module}.{expert}.{part}.lora_A.weight"] = a
            tensors[f"base_model.model.{module}.{expert}.{part}.lora_B.weight"] = b


@torch.no_grad()
def merge_experts(model: Any, adapter: Path) -> None:
    """Add an adapter to a model of transformers, in place."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    lora = load_file(adapter / "adapter_model.safetensors")
    named = dict(model.named_parameters())
    for key, a in lora.items():
        if ".lora_A." not in key:
            continue
        b = lora[key.replace(".lora_A.", ".lora_B.")]
        path = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        single = re.fullmatch(r"(.*)\.(?:mlp|block_sparse_moe|mixer)\.experts\.(\d+)\.(\w+)", path)
        scale = config["lora_alpha"] / config["r"]
        if f"{path}.weight" in named:  # experts too, in older releases
            named[f"{path}.weight"] += scale * b @ a
            continue
        if single is not None:
            _merge_one(named, single[1], int(single[2]), single[3], scale * b @ a)
            continue
        module = path.replace(".base_layer", "")
        first = "gate_up_proj" if f"{module}.gate_up_proj" in named else "up_proj"
        leaf = first if path != module or "experts.down_proj" not in config["target_parameters"] else "down_proj"
        parameter = named[f"{module}.{leaf}"]
        count = len(parameter)
        down, up = a.view(count, -1, a.shape[1]), b.view(b.shape[0], -1, count)
        order = "eio" if type(model.get_submodule(module)).__name__ in TRANSPOSED else "eoi"
        parameter += scale * torch.einsum(f"ore,eri->{order}", up, down)  # alpha and rank grow together


def _merge_one(named: dict[str, Any], layer: str, expert: int, part: str, delta: Tensor) -> None:
    if f"{layer}.mixer.experts.{part}" in named:  # without gates
        named[f"{layer}.mixer.experts.{part}"][expert] += delta
        return
    stack = named[f"{layer}.mlp.experts.{'down_proj' if part in ('down_proj', 'w2') else 'gate_up_proj'}"]
    rows = len(delta)
    first = rows if part in ("up_proj", "w3") else 0
    stack[expert, first : first + rows] += delta
