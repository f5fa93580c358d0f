"""Muse Glimmer and Muse Spark in the operations of CUDA against plain PyTorch: a prompt, and tokens one by one behind
it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from gpu_harness import DEVICE, MODE, QUICK, check, rand, rng
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from penstock.engine.backends.cuda.experts import group  # noqa: E402
from penstock.engine.backends.cuda.linear import CudaLinear  # noqa: E402
from penstock.engine.backends.cuda.ops import TritonOps  # noqa: E402
from penstock.engine.backends.interface import AttentionBatch  # noqa: E402
from penstock.engine.backends.reference.backend import ReferenceBackend  # noqa: E402
from penstock.engine.kv.cache import KVCache  # noqa: E402
from penstock.engine.loading.random_checkpoint import RandomCheckpoint  # noqa: E402
from penstock.engine.models.build import build_decoder  # noqa: E402
from penstock.engine.models.decoder import Decoder  # noqa: E402
from penstock.engine.models.families import read_config  # noqa: E402

BLOCK, PROMPT, MORE = (16, 5, 1) if QUICK else (16, 19, 2)
SIZES: dict[str, Any] = {
    "hidden_size": 32 if QUICK else 64, "intermediate_size": 32, "num_hidden_layers": 2 if QUICK else 5,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 67,
    "max_position_embeddings": 128, "sliding_window": 3, "output_multiplier": 0.7, "post_norm_eps": 1e-2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "muse_glimmer_text": {},
    "muse_spark_text": {
        "num_local_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "moe_hidden_size": 32,
        "routed_scaling_factor": 1.7, "mlp_layer_types": ["dense"] + ["sparse"] * (SIZES["num_hidden_layers"] - 1),
    },
}  # fmt: skip


class Checkpoint:
    """Random numbers, also in place of norms and biases, on the host."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.random = RandomCheckpoint(config, seed=5, dtype=torch.float32, embedding_scale=1.0)
        self.config, self.names = self.random.config, self.random.names
        self._small = {
            name: rand(*shape, dtype=torch.float32, scale=0.3).cpu()
            for name, shape in self.random.shapes.items()
            if len(shape) == 1
        }

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        found = self._small[name] if name in self._small else self.random.tensor(name, "cpu")
        return found.to(device)


class Kernels(ReferenceBackend):
    """Makes what CUDA runs."""

    def __init__(self) -> None:
        super().__init__()
        self.device, self.ops = torch.device(DEVICE), TritonOps(DEVICE)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> CudaLinear:
        return CudaLinear(weight, bias)

    def experts(self, stored: Any, widened: Any) -> Any:
        found = group(stored())
        assert found is not None
        return found


def decoder_of(weights: Checkpoint, backend: ReferenceBackend) -> tuple[Decoder, KVCache]:
    decoder = build_decoder(weights, read_config(weights.config), backend, dtype=torch.float32, max_positions=64)
    return decoder, KVCache(decoder.cache_shape(BLOCK, torch.float32), 8, backend.device)


def one_token(position: int, device: torch.device) -> AttentionBatch:
    """The next token of that sequence."""
    batch, one = AttentionBatch.of_one(position + 1, BLOCK, device), torch.tensor([0, 1], dtype=torch.int32)
    batch.positions, batch.slots, batch.query_starts = batch.positions[-1:], batch.slots[-1:], one.to(device)
    batch.num_decodes, batch.max_query = 1, 1
    return batch


def test_layers_compute_what_plain_torch_does() -> None:
    if MODE == "compile":
        return
    for kind, more in MODELS.items():
        weights = Checkpoint({"model_type": kind, **SIZES, **more})
        sides = [decoder_of(weights, ReferenceBackend()), decoder_of(weights, Kernels())]
        ids = torch.tensor([rng.randrange(67) for _ in range(PROMPT + MORE)])
        with torch.inference_mode():
            steps = [(slice(0, PROMPT), None), *((slice(at, at + 1), at) for at in range(PROMPT, PROMPT + MORE))]
            for part, position in steps:
                found = []
                for decoder, kv in sides:
                    device = decoder.embedding.device
                    batch = AttentionBatch.of_one(PROMPT, BLOCK, device)
                    batch = batch if position is None else one_token(position, device)
                    hidden = decoder.forward(ids[part].to(device), batch, kv)
                    found.append(decoder.logits(hidden).cpu())
                check(f"{kind} at {part.start}", found[1], found[0].double(), 2e-4)
