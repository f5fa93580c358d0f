"""Batches, caches and small models with attention over latents, for the tests of its kernels and engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpu_harness import DEVICE, QUICK, integers, rand, rng
from torch import Tensor

from penstock.engine.backends.cuda.experts import group, with_shared
from penstock.engine.backends.cuda.linear import CudaLinear
from penstock.engine.backends.cuda.ops import TritonOps
from penstock.engine.backends.interface import FP8, INT8, SCALE_DTYPE, AttentionBatch, LatentLayout

BF16 = torch.bfloat16
BLOCK = 16
ops = TritonOps(DEVICE)
if QUICK:
    ops.processors = 8  # every share is a program, and the interpreter takes milliseconds for one


def make_layout(heads: int, latent: int, plain: int, rotary: int, value: int, interleaved: bool) -> LatentLayout:
    return LatentLayout(heads, latent, plain, rotary, value, (plain + rotary) ** -0.5, interleaved)


def make_batch(decodes: list[int], prompts: list[tuple[int, int]]) -> tuple[AttentionBatch, int]:
    """Contexts of decodes; new tokens and contexts of prompts. The blocks of sequences are scattered."""
    contexts = [*decodes, *(context for _, context in prompts)]
    lengths = [*([1] * len(decodes)), *(new for new, _ in prompts)]
    width = -(-max(contexts) // BLOCK)
    blocks = list(range(1, 1 + len(contexts) * width))
    rng.shuffle(blocks)
    tables = [blocks[i * width : (i + 1) * width] for i in range(len(contexts))]
    positions = [p for new, all_ in zip(lengths, contexts, strict=True) for p in range(all_ - new, all_)]
    owners = [i for i, new in enumerate(lengths) for _ in range(new)]
    slots = [tables[i][p // BLOCK] * BLOCK + p % BLOCK for i, p in zip(owners, positions, strict=True)]
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    batch = AttentionBatch(
        positions=integers(positions, torch.int64),
        slots=integers(slots, torch.int64),
        query_starts=integers(starts, torch.int32),
        context_lens=integers(contexts, torch.int32),
        rows=integers(list(range(len(contexts))), torch.int32),
        block_tables=torch.tensor(tables, dtype=torch.int32, device=DEVICE),
        num_decodes=len(decodes),
        max_query=max(lengths),
        max_context=max(contexts),
    )
    return batch, 1 + len(contexts) * width


def make_cache(layout: LatentLayout, blocks: int, kind: torch.dtype) -> tuple[Tensor, Tensor | None]:
    dense = torch.float32 if kind == torch.float32 else BF16
    latents = rand(blocks, BLOCK, layout.cached, dtype=dense)
    if kind == INT8:
        return (latents.float() * 40).clamp(-127, 127).to(INT8), rand(blocks, BLOCK).abs().mul(0.02).to(SCALE_DTYPE)
    if kind == FP8:
        return latents.to(FP8), torch.full((1,), 0.7, device=DEVICE)
    return latents, None


def positions_table(rotary: int, positions: int) -> Tensor:
    angles = torch.arange(positions).unsqueeze(1) * 10000.0 ** (-torch.arange(0, rotary, 2) / rotary)
    return torch.cat((angles.cos(), angles.sin()), 1).float().to(DEVICE)


CONFIG = {
    "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 20, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "max_position_embeddings": 1024,
}  # fmt: skip
INDEX = {"index_topk": 40, "index_head_dim": 16, "index_n_heads": 16}
MODELS = {
    "v2 lite": {"model_type": "deepseek_v2", "q_lora_rank": None},
    "v2": {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    "v3": {"model_type": "deepseek_v3", "n_group": 4, "topk_group": 2},
    "kimi": {"model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "v3.2": {"model_type": "deepseek_v32", "n_group": 4, "topk_group": 2, **INDEX},
    "glm-5": {
        "model_type": "glm_moe_dsa",
        "n_group": 1,
        "topk_group": 1,
        "indexer_types": ["full", "full", "shared"],
        **INDEX,
    },
}


class OnTriton:
    """See `LayerFactory`: what the CUDA backend makes, wherever the kernels run."""

    device = DEVICE

    def __init__(self) -> None:
        self.ops = ops

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> CudaLinear:
        return CudaLinear(weight, bias)

    def as_head(self, linear: Any) -> Any:
        return linear

    def experts(self, stored: Callable[[], Any], widened: Callable[[], Any]) -> Any:
        return group(stored())

    def with_shared(self, **parts: Any) -> Any:
        return with_shared(**parts)
