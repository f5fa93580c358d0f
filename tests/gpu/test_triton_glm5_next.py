"""What GLM-5-Next asks of kernels: decays with a bound in delta nets, and attention to tokens that were chosen in
PyTorch; engines against plain PyTorch on the CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from gpu_harness import MODE, QUICK, check, poisoned_outputs, rand
from latent_cases import make_batch, make_cache, make_layout, ops, positions_table
from state_cases import DECODES, VERIFIED, Run, engines_equal_the_cpu
from test_triton_delta import CHANNELS, KIMI, build, compare

from penstock.engine.backends.interface import Entries, LatentWeights, PooledIndexLayout
from penstock.engine.backends.reference.ops import ReferenceOps

BOUNDED = dataclasses.replace(CHANNELS, lowest=-5.0)
CASES = ((BOUNDED, torch.float32),) if QUICK else (
    (BOUNDED, torch.float32), (dataclasses.replace(KIMI, lowest=-5.0), torch.bfloat16),
)  # fmt: skip
MODEL: dict[str, Any] = {
    "model_type": "glm5_next_text", "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 1024,
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention", "indexed_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 32, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "index_topk": 32, "index_kpool": 8, "index_head_dim": 16, "index_n_heads": 16, "linear_num_heads": 4,
    "linear_head_dim": 16,
}  # fmt: skip


def test_decays_with_a_bound() -> None:
    """Of decodes, draft tokens, a prompt, and one whose channels forget as fast as they may."""
    for layout, dtype in CASES:
        compare(f"decodes {dtype}", build(layout, DECODES + VERIFIED, dtype))
        compare(f"prompt {dtype}", build(layout, [*DECODES[:1], Run(33, 37, 3, (3,), False)], dtype))
    case = build(BOUNDED, [Run(33, 37, 3, (3,), False)], torch.float32)
    case.weights.decay_bias.add_(300.0)
    compare("fast decays", case)


def test_attention_to_tokens_of_pools() -> None:
    """Some sequences of a step see everything."""
    layout, index = make_layout(4, 32, 24, 0, 20, interleaved=True), PooledIndexLayout(4, 16, 4, 2)
    batch, blocks = make_batch([9, 11, 40], [(3, 6), (5, 30)])
    cache, scales = make_cache(layout, blocks, torch.float32)
    if MODE != "compile":
        cache[:] = rand(*cache.shape)
    theirs, tokens = cache.clone(), len(batch.positions)
    weights = LatentWeights(rand(32), 1e-6, rand(4, 44, 32, scale=0.1))
    given = rand(tokens, 4 * 24), rand(tokens, 32), layout, weights, positions_table(0, 100), batch
    pools = Entries(rand(blocks, 4, 16), None, 16)
    asked = rand(tokens, 4 * 16), rand(tokens, 4), index, batch, pools
    if MODE == "compile":
        return
    chosen = ops.choose_pools(*asked)
    assert [one.sequence for one in chosen] == [2, 4]
    with poisoned_outputs():
        got = ops.attend_chosen(*given, cache, scales, None, chosen)
    want = ReferenceOps().attend_chosen(*given, theirs, scales, None, ReferenceOps().choose_pools(*asked))
    check("attention", got, want, 1e-4)
    check("cache", cache, theirs)


def test_engines_equal_the_cpu() -> None:
    """Prefix hits, preemption and rejected draft tokens. Steps are launched one by one, none is captured."""
    if MODE == "device":
        engines_equal_the_cpu(MODEL, captures=False)
