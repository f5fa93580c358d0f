"""What Mistral Large 4 asks of the kernels over latents: layers that rotate nothing, layers that attend to latents that
others have stored, and factors of query heads, against the reference; and engines against plain PyTorch on the CPU."""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Any

import torch
from gpu_harness import DEVICE, MODE, QUICK, TOLERANCE, check, checked_addresses, poisoned_outputs, rand, rng
from latent_cases import BF16, CONFIG, make_batch, make_cache, make_layout, ops, positions_table
from test_triton_chosen import INDEX_MODULES, LATENT_MODULES, attention_case, lists_of, reference_lists, with_longest
from test_triton_chosen_engine import kernels
from test_triton_latent_engine import OnHost
from torch import Tensor

from penstock.engine.backends.cuda.graphs import GraphExecutor
from penstock.engine.backends.interface import FP8, INT8, HeadScales, IndexLayout, IndexNorm, LatentWeights
from penstock.engine.backends.reference.ops import ReferenceOps
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.loading.random_checkpoint import RandomCheckpoint
from tests.engine.harness import assert_idle, generate, greedy

KINDS = (torch.float32, INT8) if QUICK else (torch.float32, BF16, INT8, FP8)
MODEL: dict[str, Any] = {
    "model_type": "mistral_large4_text", "n_group": 4, "topk_group": 2, "n_shared_experts": 1,
    "index_topk": 40, "index_head_dim": 16, "index_n_heads": 16, "num_hidden_layers": 5,
    "indexer_types": ["full", "full", "full", "full", "shared"], "no_rope_layers": [1, 0, 1, 0, 0],
    "kv_source_layers": [0, 1, 2, 1, 1], "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
FEWER: dict[str, Any] = {
    "num_hidden_layers": 3, "indexer_types": ["full", "full", "shared"], "no_rope_layers": [1, 0, 0],
    "kv_source_layers": [0, 1, 1], "index_topk": 8,
}  # fmt: skip
"""Every program takes the interpreter tens of milliseconds."""


def test_attention_where_nothing_is_rotated_or_nothing_is_stored() -> None:
    shapes = [(4, 32, 24, 20)] if QUICK else [(4, 32, 24, 20), (64, 512, 128, 128)]
    steps: list[tuple[list[int], list[tuple[int, int]]]] = [([5, 40, 1], []), ([3] * 9, [(7, 7), (5, 30)])]
    if QUICK:
        steps[1] = [3, 20], [(7, 7), (5, 30)]
    for (heads, latent, size, value), rotary, stored, (decodes, prompts) in product(
        shapes, (0, 8), (True, False), steps
    ):
        if rotary and stored:
            continue  # as all other models
        for kind in KINDS:
            layout = make_layout(heads, latent, size - rotary, rotary, value, interleaved=True)
            dtype = torch.float32 if kind == torch.float32 or QUICK else BF16
            batch, blocks = make_batch(decodes, prompts)
            cache, scales = make_cache(layout, blocks, kind)
            tokens = len(batch.positions)
            q, kv = rand(tokens, heads * size, dtype=dtype), rand(tokens, layout.cached, dtype=dtype)
            up = rand(heads, layout.plain + value, latent, dtype=dtype, scale=0.1)
            weights = LatentWeights(rand(latent, dtype=dtype), 1e-6, up)
            before, table = cache.clone(), positions_table(rotary, 100)
            theirs, their_scales = cache.clone(), None if scales is None else scales.clone()
            given = q, kv if stored else None, layout, weights, table, batch
            with poisoned_outputs(), checked_addresses(*LATENT_MODULES):
                got = ops.latent_attention(*given, cache, scales)
            if MODE == "compile":
                continue
            want = ReferenceOps().latent_attention(*given, theirs, their_scales)
            name = f"{heads} heads, {rotary} rotated, stored {stored}, {kind}, {decodes}, {prompts}"
            if stored:
                check(f"cache {name}", cache.float(), theirs.float(), 1e-5 if kind == torch.float32 else 1e-2)
            else:
                assert torch.equal(cache.view(torch.uint8), before.view(torch.uint8)), name
            check(name, got, want, 1e-4 if kind == torch.float32 else 2e-2)


def test_chosen_tokens_where_nothing_is_rotated() -> None:
    """Whole numbers, so that the same tokens must be chosen; attention to them with and without tokens to store."""
    for stored in (True, False):
        layout, index = make_layout(4, 32, 24, 0, 20, True), IndexLayout(4, 16, 0, 8, True)
        batch, blocks = make_batch([9, 8, 40], [(3, 6), (5, 30)])
        given, cache, scales, asked = attention_case(
            layout, index, with_longest(batch), blocks, torch.float32, torch.float32
        )
        q, kv, *rest = given
        given = q, kv if stored else None, *rest
        if not stored and MODE != "compile":
            cache[:] = rand(*cache.shape)
        theirs = cache.clone()
        with poisoned_outputs(), checked_addresses(*INDEX_MODULES, *LATENT_MODULES):
            chosen = ops.choose_tokens(*asked)
            got = ops.attend_chosen(*given, cache, scales, None, chosen)
        if MODE == "compile":
            continue
        plain = ReferenceOps()
        found = plain.choose_tokens(*asked)
        assert lists_of(chosen, len(q)) == reference_lists(found, batch)
        check(f"stored {stored}", got, plain.attend_chosen(*given, theirs, scales, None, found), 1e-4)


def test_index_keys_that_are_not_rotated() -> None:
    for dim, dtype in product((12,) if QUICK else (12, 128), (torch.float32, BF16)):
        layout = IndexLayout(4, dim, 0, 8, True)
        batch, blocks = make_batch([5, 1], [(3, 20)])
        norm = IndexNorm(rand(dim, dtype=dtype), rand(dim, dtype=dtype), 1e-6)
        keys, cache = rand(5, dim, dtype=dtype), rand(blocks * 16, dim, dtype=dtype)
        theirs, table = cache.clone(), positions_table(0, 30)
        with checked_addresses(*INDEX_MODULES):
            ops.store_index_keys(keys, norm, layout, table, batch, cache)
        ReferenceOps().store_index_keys(keys, norm, layout, table, batch, theirs)
        check(f"keys {dim} {dtype}", cache, theirs)


def _scales(heads: int, positions: int) -> HeadScales:
    logarithms: Tensor = (torch.arange(positions) + 1).float().log().to(DEVICE)
    return HeadScales(rand(heads), rand(heads), logarithms)


def test_factors_of_query_heads() -> None:
    for (heads, size), dtype in product([(3, 20)] if QUICK else [(3, 20), (64, 128)], (torch.float32, BF16)):
        scales, positions = _scales(heads, 1000), torch.tensor([0, 7, 999, 1, 500], device=DEVICE)
        # As a part of a product's result: rows lie apart.
        queries = rand(5, heads * size + 40, dtype=dtype)[:, : heads * size]
        got = ops.scale_heads(queries, positions, scales)
        if MODE == "compile":
            continue
        factors = scales.logarithms[positions].double().unsqueeze(1) * scales.rates.double() + scales.offsets.double()
        want = queries.double().view(5, heads, size) * factors.unsqueeze(2)
        assert got.dtype == dtype and got.is_contiguous()
        check(f"{heads} x {size} {dtype}", got, want.view(5, -1), TOLERANCE[dtype])
        check(
            f"as the reference {dtype}", got, ReferenceOps().scale_heads(queries, positions, scales), TOLERANCE[dtype]
        )


def load(device: str) -> Engine:
    config = {key: value for key, value in CONFIG.items() if key != "q_lora_rank"} | MODEL | (FEWER if QUICK else {})
    weights = OnHost(RandomCheckpoint(config, seed=5, dtype=torch.float32, embedding_scale=1.0))
    settings = EngineConfig(model="random", device=device, dtype="float32", num_blocks=100, max_running=8, threads=1)
    changes: dict[str, Any] = {"token_budget": 96}
    if QUICK:
        changes = {"max_running": 2, "max_model_len": 32, "token_budget": 12}
    return Engine.load(dataclasses.replace(settings, **changes), checkpoint=weights)


def test_engines_give_the_tokens_of_plain_torch() -> None:
    """Prompts in chunks, prefixes found again, contexts beyond what may be chosen, decodes in graphs."""
    if MODE == "compile":
        return
    prompts = [[rng.randrange(199) for _ in range(n)] for n in ((2, 18) if QUICK else (1, 17, 130, 300))]
    requests = [greedy(f"r{i}", prompt, 2 if QUICK else 24) for i, prompt in enumerate(prompts)]
    wanted = generate(load("cpu"), *requests)
    with kernels() as device:
        engine = load(device)
        for _ in range(2):  # the second time with the prompts found in the cache
            assert generate(engine, *requests) == wanted
        executor = engine.runner.executor
        assert isinstance(executor, GraphExecutor) and executor.long_graphs is not None
        assert executor.long_graphs._captured, "long contexts decode in graphs"
        assert_idle(engine)
