"""The engines of a soak: tiny random checkpoints and adapters on disk, and on them pairs of engines.

One of a pair is crowded: few blocks, few slots, small steps, and all features that change when things are computed but
must not change what comes out. The other is plain, and has room for everything.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.grammar.constraints import MakeCompiler
from penstock.engine.loading.random_checkpoint import RandomCheckpoint
from penstock.engine.speculative.gain import StepCosts
from penstock.engine.speculative.speculation import Speculation

VOCAB = 199
BLOCK = 16
WINDOW = 320
"""Longest text; the crowded pool holds few of that length."""
ADAPTERS = tuple(f"adapter-{index}" for index in range(8))
_RANK = 8
_MODEL: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_LATER = 0.35
"""Scale of what later layers add, so that a draft model of the first layer alone is often right."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A configuration of the crowded engine. `tie`: logits this close may be swapped (see `check`)."""

    name: str
    model: str
    settings: dict[str, Any]
    plain: dict[str, Any]
    """Settings that the plain engine must share, because they change numbers."""
    tie: float
    adapters: bool = True
    ahead: bool = False
    """Launch steps before the last one is collected on CPU too, as is always done on CUDA."""
    on_cpu: dict[str, Any] = field(default_factory=dict)
    """More settings that change numbers, on CPU only."""

    def tie_on(self, device: str) -> float:
        """On CUDA, kernels for few and for many rows differ more, in float32 too."""
        return self.tie if device == "cpu" or not self.tie else max(self.tie, 0.02)


_INT8 = {"weights": "int8", "activations": "int16"}
"""Few-bit weights run from a recorded step. One form of activations for any number of rows; `auto` varies with it."""
VARIANTS = (
    Variant("ngram", "base", {"speculation": "ngram"}, {}, 1e-3, ahead=True),
    # A last bit that differs may round a key to another int8; what comes of that is small, but not the last bit.
    Variant("draft-int8", "base", {"speculation": "draft"}, {"kv_dtype": "int8"}, 0.02, on_cpu=_INT8),
    Variant("window", "window", {"speculation": "ngram"}, {}, 1e-3, ahead=True),
    # Nothing is a tie here: log-probabilities are equal to the last bit too. Adapters are not available in this mode.
    Variant("deterministic", "base", {"speculation": "draft"}, {"deterministic": True}, 0.0, adapters=False),
)


class FreeSteps(StepCosts):
    """Every step takes as long as any other."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def observe(self, tokens: int, seconds: float) -> None:
        """Nothing is learned."""

    @property
    def largest(self) -> int:
        return 1 << 20

    def knows(self, tokens: int) -> bool:
        return True

    def estimate(self, tokens: int) -> float | None:
        return self.seconds


def verify_everything(speculation: Speculation) -> None:
    """Make all draft tokens worth verifying, right or wrong: they cost nothing, and plain steps take twice as long."""
    speculation.plain, speculation.verifying = FreeSteps(2.0), FreeSteps(1.0)


@dataclass(frozen=True, slots=True)
class Pair:
    variant: Variant
    crowded: Engine
    plain: Engine


def prepare(folder: Path) -> None:
    """Write the models and their adapters."""
    _write_model(folder / "base", _MODEL)
    _write_model(folder / "draft", {**_MODEL, "num_hidden_layers": 1})
    window = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 40}
    _write_model(folder / "window", {**_MODEL, **window})
    for seed, name in enumerate(ADAPTERS):
        _write_adapter(folder / name, seed)


def adapter_spec(folder: Path, name: str) -> AdapterSpec:
    return AdapterSpec(name, str(folder / name), pinned=name == ADAPTERS[0])


def load_pair(folder: Path, variant: Variant, device: str, make: MakeCompiler, clock: Callable[[], float]) -> Pair:
    """Both engines of a variant; `clock` is what the crowded one takes for the time."""
    shared = EngineConfig(
        model=str(folder / variant.model),
        device=device,
        dtype="float32",
        threads=1,
        block_size=BLOCK,
        max_model_len=WINDOW,
        adapters=tuple(adapter_spec(folder, name) for name in ADAPTERS) if variant.adapters else (),
        adapter_rank=_RANK,
        **{"weights": "dense", **variant.plain, **(variant.on_cpu if device == "cpu" else {})},
    )
    plain = replace(shared, max_running=1, num_blocks=WINDOW // BLOCK + 2, prefix_cache=False)
    settings: dict[str, Any] = {
        "num_blocks": 26,
        "max_running": 12,
        "token_budget": 64,
        "host_memory": 1 << 20,
        "host_idle_s": 0.05,
        "adapter_slots": 3 if variant.adapters else None,
        "adapter_host_slots": 5,
        "draft_model": str(folder / "draft") if variant.settings["speculation"] == "draft" else None,
    }
    crowded = Engine.load(replace(shared, **settings, **variant.settings), grammars=make)
    crowded.clock = clock
    if variant.ahead:
        crowded._depth = 1
    assert crowded.speculation is not None
    verify_everything(crowded.speculation)
    return Pair(variant, crowded, Engine.load(plain, grammars=make))


def _write_model(folder: Path, config: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    source = RandomCheckpoint(config, dtype=torch.float32)
    tensors = {name: source.tensor(name).contiguous() for name in source.names()}
    for name, tensor in tensors.items():
        if ".layers." in name and ".layers.0." not in name and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(_LATER)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def _write_adapter(folder: Path, seed: int) -> None:
    """Large enough to change every answer; some adapters change only attention."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    source = RandomCheckpoint(_MODEL, dtype=torch.float32)
    wanted = ("q_proj", "v_proj") if seed % 3 == 2 else ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")
    rank = (4, _RANK)[seed % 2]
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in source.shapes.items():
        module = name.removesuffix(".weight")
        if module.endswith(wanted):
            outputs, inputs = shape
            spread = 0.4 / math.sqrt(rank)
            key = f"base_model.model.{module}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * spread
            tensors[f"{key}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * spread
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(wanted), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
