"""Adapters of the kinds that are not LoRA, as PEFT saves them, and the checkpoint with one merged into it, computed as
each kind defines it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.adapters.files import shapes

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
Parts = Mapping[str, Tensor]
KINDS: dict[str, dict[str, Any]] = {
    "adalora": {"peft_type": "ADALORA", "init_r": 5, "lora_alpha": 12, "r": 8, "target_r": 3},
    "vera": {"peft_type": "VERA", "r": 6, "save_projection": True},
    "vera-drawn": {"peft_type": "VERA", "r": 6, "save_projection": False, "projection_prng_key": 11},
    "loha": {"peft_type": "LOHA", "r": 3, "alpha": 6, "rank_pattern": {"q_proj": 2}},
    "lokr": {"peft_type": "LOKR", "r": 2, "alpha": 5, "alpha_pattern": {"down_proj": 3}},
    "miss": {"peft_type": "MISS", "r": 5, "init_weights": True},
    "miss-mini": {"peft_type": "MISS", "r": 4, "init_weights": "mini", "mini_r": 8},
    "delora": {"peft_type": "DELORA", "r": 4, "delora_lambda": 15},
    "vblora": {"peft_type": "VBLORA", "r": 3, "num_vectors": 9, "vector_length": 16, "topk": 2},
    "vblora-topk": {
        "peft_type": "VBLORA", "r": 3, "num_vectors": 9, "vector_length": 16, "topk": 3, "save_only_topk_weights": True,
    },
    "ia3": {"peft_type": "IA3", "feedforward_modules": ["down_proj"]},
    "ia3-inputs": {"peft_type": "IA3", "feedforward_modules": ["down_proj", "o_proj", "q_proj", "kv_b_proj"]},
    "oft": {"peft_type": "OFT", "oft_block_size": 8},
    "oft-small": {"peft_type": "OFT", "oft_block_size": 4},
    "oft-exact": {"peft_type": "OFT", "oft_block_size": 4, "use_cayley_neumann": False, "block_share": True},
    "oft-bound": {"peft_type": "OFT", "oft_block_size": 16, "num_cayley_neumann_terms": 4, "coft": True, "eps": 2.0},
    "boft": {"peft_type": "BOFT", "boft_block_size": 8, "boft_n_butterfly_factor": 1},
    "boft-small": {"peft_type": "BOFT", "boft_block_size": 4, "boft_n_butterfly_factor": 1},
    "boft-butterfly": {"peft_type": "BOFT", "boft_block_size": 4, "boft_n_butterfly_factor": 3},
    "beft": {"peft_type": "BEFT"},
    "norms": {"peft_type": "LN_TUNING"},
    "tokens": {"peft_type": "TRAINABLE_TOKENS", "token_indices": [7, 3, 150, 11]},
}  # fmt: skip
"""Configurations, by name."""
TARGETS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
_TARGETS_OF = {"norms": ("input_layernorm", "norm"), "tokens": ("embed_tokens",)}


class Noise:
    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *sizes: int, spread: float = 0.3) -> Tensor:
        return torch.randn(*sizes, generator=self._generator) * spread


def write_kind(folder: Path, base: Path, name: str, *, targets: tuple[str, ...] = TARGETS, seed: int = 0) -> Path:
    """A random adapter of this kind for the checkpoint in `base`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**KINDS[name], "target_modules": list(_TARGETS_OF.get(name, targets)), "inference_mode": True}
    noise, kind = Noise(seed), name.partition("-")[0]
    tensors: dict[str, Tensor] = {}
    weights = load_file(base / "model.safetensors")
    if kind == "vera":
        if config["save_projection"]:
            most = [max(shape[side] for shape in _targeted(base, config).values()) for side in (0, 1)]
            tensors["base_model.vera_A"] = noise(config["r"], most[1])
            tensors["base_model.vera_B"] = noise(most[0], config["r"])
    elif kind == "vblora":
        tensors["base_model.vblora_vector_bank"] = noise(config["num_vectors"], config["vector_length"])
    if name == "adalora":
        config["rank_pattern"] = {}
    for module, shape in _targeted(base, config).items():
        for key, tensor in _WRITERS[kind](noise, module, shape, config, weights).items():
            tensors[f"base_model.model.{module}.{key}"] = tensor
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


def _targeted(base: Path, config: Mapping[str, Any]) -> dict[str, list[int]]:
    names = config["target_modules"]
    return {
        name.removesuffix(".weight"): shape
        for name, shape in shapes(base).items()
        if name.endswith(".weight") and name.removesuffix(".weight").rpartition(".")[2] in names
    }


def _adalora(noise: Noise, module: str, shape: list[int], config: dict[str, Any], weights: Parts) -> Parts:
    # Of one module nothing is left, and of the others some.
    kept = [index % 2 == 0 and "1.self_attn.o_proj" not in module for index in range(config["init_r"])]
    rank = sum(kept)
    config["rank_pattern"][f"{module}.lora_E"] = kept
    return {"lora_A": noise(rank, shape[1]), "lora_E": noise(rank, 1), "lora_B": noise(shape[0], rank)}


def _vera(noise: Noise, module: str, shape: list[int], config: dict[str, Any], weights: Parts) -> Parts:
    return {"vera_lambda_b": noise(shape[0]), "vera_lambda_d": noise(config["r"], spread=1.0)}


def _loha(noise: Noise, module: str, shape: list[int], config: dict[str, Any], weights: Parts) -> Parts:
    rank = _pattern(config, "rank_pattern", module, config["r"])
    return {
        f"hada_w{number}_{side}": noise(*(shape[0], rank) if side == "a" else (rank, shape[1]), spread=0.4)
        for number in (1, 2)
        for side in "ab"
    }


def _lokr(noise: Noise, module: str, shape: list[int], config: dict[str, Any], weights: Parts) -> Parts:
    rank, small = config["r"], 4
    if "up_proj" in module:  # both in two pieces
        first = {"lokr_w1_a": noise(small, rank), "lokr_w1_b": noise(rank, 2 * small)}
        return first | {
            "lokr_w2_a": noise(shape[0] // small, rank),
            "lokr_w2_b": noise(rank, shape[1] // (2 * small)),
        }
    whole = {"lokr_w1": noise(2, small), "lokr_w2": noise(shape[0] // 2, shape[1] // small, spread=0.1)}
    if "v_proj" in module:
        return whole
    pieces = {"lokr_w2_a": noise(shape[0] // 2, rank), "lokr_w2_b": noise(rank, shape[1] // small)}
    return {"lokr_w1": whole["lokr_w1"], **pieces}


def _miss(noise: Noise, module: str, shape: list[int], config: dict[str, Any], weights: Parts) -> Parts:
    outputs = config["mini_r"] if config["init_weights"] == "mini" else shape[0]
    return {"miss_block": noise(config["r"], outputs, spread=0.1)}


def _delora(noise: Noise, module: str, shape: list[int], config: dict[str, Any], weights: Parts) -> Parts:
    return {
        "delora_A": noise(config["r"], shape[1]),
        "delora_B": noise(shape[0], config["r"]),
        "delora_lambda": noise(1) + 2,
        "delora_w_norm": weights[f"{module}.weight"].norm(dim=0),
    }


def _vblora(noise: Noise, module: str, shape: list[int], config: dict[str, Any], weights: Parts) -> Parts:
    tiles = [size // config["vector_length"] for size in shape]
    found: dict[str, Tensor] = {}
    for side, sizes in (("A", (config["r"], tiles[1])), ("B", (tiles[0], config["r"]))):
        logits = noise(*sizes, config["num_vectors"], spread=2.0)
        if not config.get("save_only_topk_weights"):
            found[f"vblora_logits_{side}"] = logits
            continue
        most, indices = logits.topk(config["topk"])
        found[f"vblora_logits_{side}_topk_indices"] = indices.to(torch.uint8)
        found[f"vblora_logits_{side}_topk_weights"] = most.softmax(-1)[..., :-1].contiguous()
    return found


def _ia3(noise: Noise, module: str, shape: list[int], config: dict[str, Any], weights: Parts) -> Parts:
    size = (1, shape[1]) if module.endswith(tuple(config["feedforward_modules"])) else (shape[0], 1)
    return {"ia3_l": 1 + noise(*size, spread=0.5)}


def _oft(noise: Noise, module: str, shape: list[int], config: dict[str, Any], weights: Parts) -> Parts:
    size = config["oft_block_size"]
    count = 1 if config.get("block_share") else shape[1] // size
    return {"oft_R.weight": noise(count, size * (size - 1) // 2, spread=0.2)}


def _beft(noise: Noise, module: str, shape: list[int], config: dict[str, Any], weights: Parts) -> Parts:
    return {"beft_bias": noise(shape[0])}


def _norms(noise: Noise, module: str, shape: list[int], config: dict[str, Any], weights: Parts) -> Parts:
    return {"ln_tuning_layers.weight": weights[f"{module}.weight"] + noise(*shape, spread=0.5)}


def _tokens(noise: Noise, module: str, shape: list[int], config: dict[str, Any], weights: Parts) -> Parts:
    return {"trainable_tokens_delta": noise(len(config["token_indices"]), shape[1], spread=1.0)}


def _boft(noise: Noise, module: str, shape: list[int], config: dict[str, Any], weights: Parts) -> Parts:
    size = config["boft_block_size"]
    turns = noise(config["boft_n_butterfly_factor"], shape[1] // size, size, size, spread=0.3)
    return {"boft_R": turns, "boft_s": 1 + noise(shape[0], 1, spread=0.1)}


_WRITERS: dict[str, Callable[[Noise, str, list[int], dict[str, Any], Parts], Parts]] = {
    "adalora": _adalora, "vera": _vera, "loha": _loha, "lokr": _lokr, "miss": _miss, "delora": _delora,
    "vblora": _vblora, "ia3": _ia3, "oft": _oft, "boft": _boft, "beft": _beft, "norms": _norms, "tokens": _tokens,
}  # fmt: skip


def _pattern(config: Mapping[str, Any], key: str, module: str, default: float) -> Any:
    return next((value for name, value in config.get(key, {}).items() if module.endswith(name)), default)


def change(config: Mapping[str, Any], module: str, weight: Tensor, own: Parts, shared: Parts) -> Tensor:
    """What is added to the matrix of a module, as the papers and PEFT have it."""
    match config["peft_type"]:
        case "ADALORA":
            factor = config["lora_alpha"] / (config["init_r"] + 1e-5)
            return factor * own["lora_B"] @ torch.diag(own["lora_E"].flatten()) @ own["lora_A"]
        case "VERA":
            outputs, inputs = weight.shape
            b, a = shared["vera_B"][:outputs], shared["vera_A"][:, :inputs]
            return torch.diag(own["vera_lambda_b"]) @ b @ torch.diag(own["vera_lambda_d"]) @ a
        case "LOHA":
            rank = _pattern(config, "rank_pattern", module, config["r"])
            factor = config["alpha"] / rank
            return factor * (own["hada_w1_a"] @ own["hada_w1_b"]) * (own["hada_w2_a"] @ own["hada_w2_b"])
        case "LOKR":
            first, second = (
                own[name] if name in own else own[f"{name}_a"] @ own[f"{name}_b"] for name in ("lokr_w1", "lokr_w2")
            )
            return _pattern(config, "alpha_pattern", module, config["alpha"]) / config["r"] * torch.kron(first, second)
        case "MISS":
            block = own["miss_block"]
            columns = torch.arange(weight.shape[1]) % config["r"]
            return block.repeat(1, weight.shape[0] // block.shape[1]).t()[:, columns]
        case "DELORA":
            a, b = own["delora_A"], own["delora_B"]
            middle = torch.diag(own["delora_lambda"] / config["r"] / (a.norm(dim=1) * b.norm(dim=0)))
            return b @ middle @ a * own["delora_w_norm"]
        case "VBLORA":
            a, b = (_from_bank(own, side, shared["vblora_vector_bank"], config["topk"]) for side in "AB")
            return b.transpose(1, 2).reshape(weight.shape[0], -1) @ a.reshape(config["r"], -1)
    raise AssertionError(config["peft_type"])


def _from_bank(own: Parts, side: str, bank: Tensor, topk: int) -> Tensor:
    name = f"vblora_logits_{side}"
    if name in own:
        logits = own[name]
        kept = logits >= logits.topk(topk).values[..., -1:]
        return logits.masked_fill(~kept, -math.inf).softmax(-1) @ bank
    indices, first = own[f"{name}_topk_indices"].long(), own[f"{name}_topk_weights"]
    weights = torch.cat((first, 1 - first.sum(-1, keepdim=True)), -1)
    return torch.zeros(*indices.shape[:-1], len(bank)).scatter(-1, indices, weights) @ bank


def rotation(config: Mapping[str, Any], stored: Tensor, inputs: int) -> Tensor:
    """What OFT multiplies rows of inputs by, from the right."""
    size, blocks = config["oft_block_size"], []
    for number in range(inputs // size):
        row = stored[0 if config.get("block_share") else number]
        skew = torch.zeros(size, size)
        skew[tuple(torch.triu_indices(size, size, 1))] = row
        skew = skew - skew.t()
        if config.get("coft"):
            skew *= min(1.0, config["eps"] / math.sqrt(len(stored)) / float(skew.norm()))
        one = torch.eye(size)
        if config.get("use_cayley_neumann", True):
            powers = [
                torch.linalg.matrix_power(skew, power) for power in range(1, config.get("num_cayley_neumann_terms", 5))
            ]
            blocks.append(one + 2 * sum(powers[:-1]) + powers[-1])
        else:
            blocks.append((one - skew) @ torch.linalg.inv(one + skew))
    return torch.block_diag(*blocks)


def butterfly(stored: Tensor) -> Tensor:
    """What BOFT multiplies rows of inputs by, from the right, with whole matrices as PEFT has them."""
    factors, count, size, _ = stored.shape
    inputs, total = count * size, torch.eye(count * size)
    for factor in range(factors):
        blocks = []
        for one in stored[factor]:
            skew = 0.5 * (one - one.t())
            blocks.append((torch.eye(size) - skew) @ torch.linalg.inv(torch.eye(size) + skew))
        order = list(range(inputs))
        if factors > 1:
            span, half = inputs // (count // 2**factor), size // 2
            order = [
                begin + run * half + at
                for begin in range(0, inputs, span)
                for run in (*range(0, span // half, 2), *range(1, span // half, 2))
                for at in range(half)
            ]
        permutation = torch.eye(inputs)[order]
        total = permutation @ torch.block_diag(*blocks) @ permutation.t() @ total
    return total


def merged(base: Path, adapter: Path, folder: Path) -> Path:
    """The checkpoint with the adapter in it; what has no bias gets one."""
    shutil.copytree(base, folder)
    config, stored = json.loads((adapter / CONFIG).read_text()), load_file(adapter / WEIGHTS)
    shared = {key.removeprefix("base_model."): value for key, value in stored.items() if ".model." not in key}
    weights = load_file(base / "model.safetensors")
    modules = _targeted(base, config)
    if config["peft_type"] == "VERA" and not shared:
        generator = torch.Generator().manual_seed(config["projection_prng_key"])
        outputs, inputs = (max(shape[side] for shape in modules.values()) for side in (0, 1))
        for name, sizes in (("vera_A", (config["r"], inputs)), ("vera_B", (outputs, config["r"]))):
            bound = math.sqrt(3.0) * math.sqrt(2) / math.sqrt(sizes[1])
            shared[name] = torch.empty(sizes).uniform_(-bound, bound, generator=generator)
    for module in modules:
        prefix = f"base_model.model.{module}."
        own = {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)}
        weight, name = weights[f"{module}.weight"], f"{module}.weight"
        match config["peft_type"]:
            case "IA3":
                weights[name] = weight * own["ia3_l"]
                if f"{module}.bias" in weights and own["ia3_l"].shape[1] == 1:
                    weights[f"{module}.bias"] = weights[f"{module}.bias"] * own["ia3_l"].flatten()
            case "OFT":
                weights[name] = weight @ rotation(config, own["oft_R.weight"], weight.shape[1]).t()
            case "BOFT":
                weights[name] = weight @ butterfly(own["boft_R"]).t() * own["boft_s"]
            case "BEFT":
                bias = weights.get(f"{module}.bias", torch.zeros(weight.shape[0]))
                weights[f"{module}.bias"] = bias + own["beft_bias"].flatten()
            case "LN_TUNING":
                weights[name] = own["ln_tuning_layers.weight"]
            case "TRAINABLE_TOKENS":
                weights[name] = weight.clone()
                weights[name][config["token_indices"]] = own["trainable_tokens_delta"]
            case _:
                weights[name] = weight + change(config, module, weight, own, shared)
    save_file(
        {key: value.contiguous() for key, value in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder
