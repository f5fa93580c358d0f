"""Attention over cached latents: what is cached, decodes beside prompts, all cache types, against the reference."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from gpu_harness import (
    DEVICE,
    MODE,
    QUICK,
    Row,
    bandwidth,
    check,
    checked_addresses,
    integers,
    poisoned_outputs,
    rand,
    rng,
    time_us,
)
from torch import Tensor

from penstock.bench.bounds import probe
from penstock.engine.adapters.latent import AbsorbedAdapters
from penstock.engine.adapters.layout import AdapterLayout, layout_of
from penstock.engine.adapters.peft import random_adapter
from penstock.engine.backends.cuda.block_fp8_linear import BlockFp8Linear
from penstock.engine.backends.cuda.experts import group, with_shared
from penstock.engine.backends.cuda.kernels import (
    common,
    expert_lora,
    latent_decode,
    latent_prefill,
    latent_query,
    latent_values,
)
from penstock.engine.backends.cuda.kernels.latent_tile import LatentConfig as LatentTile
from penstock.engine.backends.cuda.linear import CudaLinear
from penstock.engine.backends.cuda.lora import TritonLora
from penstock.engine.backends.cuda.ops import TritonOps
from penstock.engine.backends.interface import FP8, INT8, SCALE_DTYPE, AttentionBatch, LatentLayout, LatentWeights
from penstock.engine.backends.reference.ops import ReferenceOps
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.kv.cache import KVCache
from penstock.engine.loading.fp8 import Fp8Checkpoint
from penstock.engine.loading.random_checkpoint import RandomCheckpoint
from penstock.engine.models.build import build_decoder
from penstock.engine.models.families import is_linear, read_config
from penstock.engine.request import Request, SamplingParams
from tests.engine.harness import drain, generate, greedy

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


def test_attention_over_latents_equals_the_reference() -> None:
    shapes = [(4, 32, 16, 8, 20)]
    if not QUICK:
        shapes += [(16, 512, 128, 64, 128), (128, 512, 128, 64, 128), (10, 96, 24, 12, 40)]
    cases: list[tuple[list[int], list[tuple[int, int]]]] = [
        ([5, 40, 1], []),
        ([3] * 9, [(7, 7), (5, 30)]),
    ]
    if not QUICK:
        cases += [([3000, 17, 900], []), ([50] * 40, [(300, 700), (1, 64)])]
    for number, shape in enumerate(shapes):
        for case, (decodes, prompts) in enumerate(cases):
            kinds = (torch.float32, BF16, INT8, FP8) if not QUICK else ((torch.float32, INT8)[case % 2],)
            for kind in kinds:
                if kind == torch.float32 and shape[0] == 128:
                    continue
                layout = make_layout(*shape, interleaved=number % 2 == 0)
                dtype = torch.float32 if kind == torch.float32 or QUICK else BF16
                batch, blocks = make_batch(decodes, prompts)
                cache, scales = make_cache(layout, blocks, kind)
                tokens = len(batch.positions)
                q = rand(tokens, layout.heads * layout.query + layout.cached, dtype=dtype)
                q, kv = q[:, : -layout.cached], q[:, -layout.cached :]
                up = rand(layout.heads, layout.plain + layout.value, layout.latent, dtype=dtype, scale=0.1)
                weights = LatentWeights(rand(layout.latent, dtype=dtype), 1e-6, up)
                table = positions_table(layout.rotary, 3001)
                theirs, their_scales = cache.clone(), None if scales is None else scales.clone()
                name = f"{shape} {kind} {len(decodes)} decodes, prompts {prompts}"
                with poisoned_outputs():
                    got = ops.latent_attention(q, kv, layout, weights, table, batch, cache, scales)
                if MODE == "compile":
                    continue
                if MODE == "device":
                    torch.cuda.synchronize()  # a kernel that fails does so here, not in the reference
                want = ReferenceOps().latent_attention(q, kv, layout, weights, table, batch, theirs, their_scales)
                check(f"cache {name}", cache.float(), theirs.float(), 1e-5 if kind == torch.float32 else 1e-2)
                check(name, got, want, 1e-4 if kind == torch.float32 else 2e-2)


def test_adapters_of_what_makes_keys_and_values_equal_another_matrix() -> None:
    """Each token with the adapter of its slot or none, against the reference with the adapter in the matrix."""
    layout = make_layout(4, 32, 16, 8, 20, interleaved=True)
    model = read_config({**CONFIG, **MODELS["v3"]})
    sites = layout_of(model, by_output=True)
    keys, values = (next(i for i, site in enumerate(sites.sites) if site.heads == kind) for kind in ("keys", "values"))
    lora = TritonLora(sites, 2, 8, torch.float32, DEVICE)
    adapters = [random_adapter(str(i), sites, rank=5 + 3 * i, dtype=torch.float32, pin=False, seed=i) for i in range(2)]
    for slot, adapter in enumerate(adapters):
        lora.put(slot, dataclasses.replace(adapter, data=adapter.data * 20))
    for decodes, prompts in (([5, 40, 1], [(7, 7), (5, 30)]), ([5], [])):
        batch, blocks = make_batch(decodes, prompts)
        counts = [1] * len(decodes) + [new for new, _ in prompts]
        slots = [[0, -1, 1, 1, 0][i] for i, count in enumerate(counts) for _ in range(count)]
        _compare_adapters(layout, batch, blocks, np.array(slots, np.int32), lora, sites, (keys, values), adapters)


def _compare_adapters(
    layout: LatentLayout,
    batch: AttentionBatch,
    blocks: int,
    of: np.ndarray[Any, Any],
    lora: TritonLora,
    sites: AdapterLayout,
    places: tuple[int, int],
    adapters: list[Any],
) -> None:
    (keys, values), tokens = places, len(of)
    lora.begin(of)
    added = AbsorbedAdapters(lora, sites.place(0, keys), sites.place(0, values))
    q = rand(tokens, layout.heads * layout.query + layout.cached, dtype=torch.float32)
    q, kv = q[:, : -layout.cached], q[:, -layout.cached :]
    up = rand(layout.heads, layout.plain + layout.value, layout.latent, dtype=torch.float32, scale=0.1)
    weights = LatentWeights(rand(layout.latent, dtype=torch.float32), 1e-6, up)
    table, (cache, _) = positions_table(layout.rotary, 100), make_cache(layout, blocks, torch.float32)
    theirs = cache.clone()
    modules = expert_lora, latent_query, latent_decode, latent_prefill, latent_values
    with poisoned_outputs(), checked_addresses(*modules):
        got = ops.latent_attention(q, kv, layout, weights, table, batch, cache, None, added)
    if MODE == "compile":
        return
    for slot, adapter in ((-1, None), *enumerate(adapters)):
        changed = up.clone()
        for head in range(layout.heads if adapter is not None else 0):
            assert adapter is not None
            for index, rows in ((keys, slice(0, layout.plain)), (values, slice(layout.plain, None))):
                a, b = _matrices(adapter.data * 20, sites, index, head, sites.width(adapter.rank))
                changed[head, rows] += (b @ a).t() if index == keys else b @ a
        other = weights._replace(up=changed)
        want = ReferenceOps().latent_attention(q, kv, layout, other, table, batch, theirs.clone(), None)
        mine = torch.from_numpy(of == slot).to(DEVICE)
        check(f"slot {slot}", got[mine], want[mine], 1e-4)


def _matrices(data: Tensor, sites: AdapterLayout, index: int, head: int, width: int) -> tuple[Tensor, Tensor]:
    """A and B of one head at one site of the first layer, as an adapter's buffer has them."""
    site, start = sites.sites[index], sites.place(0, index).start
    begin = width * (start + head * site.each)
    middle = begin + width * site.inputs
    a = data[begin:middle].view(width, site.inputs)
    return a.to(DEVICE), data[middle : middle + width * site.outputs].view(site.outputs, width).to(DEVICE)


CONFIG = {
    "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 20, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "max_position_embeddings": 1024,
}  # fmt: skip
MODELS = {
    "v2 lite": {"model_type": "deepseek_v2", "q_lora_rank": None},
    "v2": {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    "v3": {"model_type": "deepseek_v3", "n_group": 4, "topk_group": 2},
    "kimi": {"model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
}


class OnHost:
    """A checkpoint whose numbers are the same on every device: each has a generator of its own."""

    def __init__(self, random: RandomCheckpoint) -> None:
        self.random, self.config, self.names = random, random.config, random.names

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        return self.random.tensor(name, "cpu").to(device)


def test_engines_give_the_tokens_of_the_reference() -> None:
    """Prompts in chunks, prefixes found again, decodes in graphs, in float32; tokens are those of the CPU."""
    if MODE != "device":
        return
    for name, changes in MODELS.items():
        weights = OnHost(RandomCheckpoint({**CONFIG, **changes}, seed=5, dtype=torch.float32, embedding_scale=1.0))
        wanted = [[rng.randrange(199) for _ in range(n)] for n in (1, 17, 130, 300)]
        found = []
        for device in ("cpu", "cuda"):
            settings = EngineConfig(
                model="random", device=device, dtype="float32", max_running=8, num_blocks=100, token_budget=96
            )
            engine = Engine.load(settings, checkpoint=weights)
            requests = [greedy(f"r{i}", prompt, 24) for i, prompt in enumerate(wanted)]
            found.append(generate(engine, *requests))
            assert generate(engine, *requests) == found[-1], (name, device)
            # Alone, steps of one token fold norms and sums into their products.
            alone = {key: tokens for one in requests for key, tokens in generate(engine, one).items()}
            assert alone == found[-1], (name, device)
        assert found[0] == found[1], name


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


def test_a_step_of_one_token_in_fused_launches() -> None:
    """Norms, residual additions, routing and the shared expert inside of products; the same numbers as apart."""
    if MODE == "compile":
        return
    qwen = {
        "model_type": "qwen3_moe", "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8,
        "num_experts_per_tok": 3, "moe_intermediate_size": 32, "max_position_embeddings": 64,
        "decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": [],
    }  # fmt: skip
    configs = [{**CONFIG, **MODELS["v2 lite"], "num_hidden_layers": 2}, qwen]
    configs += [] if QUICK else [{**CONFIG, **MODELS["v3"]}]
    for config in configs:
        weights = OnHost(RandomCheckpoint(config, seed=5, dtype=torch.float32, embedding_scale=1.0))
        decoder = build_decoder(
            weights, read_config(weights.config), OnTriton(), dtype=torch.float32, max_positions=64, fused_up_to=8
        )
        assert decoder.fused_up_to == 1
        apart = dataclasses.replace(decoder, fused_up_to=0)
        batch, blocks = make_batch([20], [])
        found = []
        for one in (decoder, apart):
            kv = KVCache(one.cache_shape(BLOCK, torch.float32), blocks, DEVICE)
            for index, layer in enumerate(kv.layers):
                filled = torch.Generator(device=DEVICE).manual_seed(index)
                for part in ("latents", "k", "v"):
                    if hasattr(layer, part):
                        getattr(layer, part).normal_(generator=filled)
            found.append(one.forward(integers([7], torch.int64), batch, kv))
        check(config["model_type"], found[0], found[1].double(), 1e-4)


class InTiles:
    """A checkpoint whose matrices are FP8 in tiles of 128 x 128, as DeepSeek V3 is published; or, `widened`, the same
    numbers in its own type. Scales are powers of two, so that they are the same."""

    def __init__(self, dense: RandomCheckpoint, *, widened: bool = False) -> None:
        self.dense, self.widened = dense, widened
        form = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        self.config = dense.config if widened else {**dense.config, "quantization_config": form}

    def names(self) -> set[str]:
        names = set(self.dense.names())
        return names if self.widened else names | {f"{name}_scale_inv" for name in names if is_linear(name)}

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        stem = name.removesuffix("_scale_inv")
        weight = self.dense.tensor(stem, "cpu").to(device)
        if not is_linear(stem):
            return weight
        rows, columns = (-(-side // 128) for side in weight.shape)
        scale = 2.0 ** (torch.arange(rows * columns, device=weight.device) % 3 - 8.0).view(rows, columns)
        if name != stem:
            return scale
        wide = scale.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)[:, : weight.shape[1]]
        rounded = (weight.float() / wide).to(FP8)
        return (rounded.float() * wide).to(weight.dtype) if self.widened else rounded


def test_a_checkpoint_in_fp8_tiles_stays_in_them() -> None:
    """Log-probabilities are those of the same numbers in bfloat16, up to its rounding."""
    if MODE != "device":
        return
    sizes = {"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128, "kv_lora_rank": 64}
    dense = RandomCheckpoint({**CONFIG, **MODELS["v3"], **sizes, "q_lora_rank": 128}, dtype=BF16, embedding_scale=1.0)
    scores = []
    for weights in (InTiles(dense, widened=True), Fp8Checkpoint(InTiles(dense))):
        settings = EngineConfig(model="random", device="cuda", dtype="bfloat16", max_running=8, num_blocks=100)
        engine = Engine.load(settings, checkpoint=weights)
        sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        engine.submit(Request("a", [7 * i % 199 for i in range(120)], sampling))
        found = [one for delta in drain(engine) for one in delta.prompt_logprobs or () if one is not None]
        scores.append(torch.tensor([one.logprob for one in found]))
        tiles = [isinstance(linear, BlockFp8Linear) for linear in engine.runner.decoder.layers[0].linears]
        assert all(tiles) if isinstance(weights, Fp8Checkpoint) else not any(tiles), tiles
    check("log-probabilities from tiles", scores[1], scores[0], 3e-2)
    assert len(generate(engine, greedy("b", list(range(50)), 16))["b"]) == 16


def test_results_do_not_depend_on_the_batch() -> None:
    """Deterministic mode: tokens of decodes and prompts, alone and among others, to the bit."""
    if MODE == "compile":
        return
    shapes = [(4, 32, 16, 8, 20)] if QUICK else [(4, 32, 16, 8, 20), (16, 512, 128, 64, 128), (128, 512, 128, 64, 128)]
    contexts = [5, 40, 1, 33, 18] if QUICK else [5, 3000, 1, 900, 257, *range(200, 500)]
    fixed = TritonOps(DEVICE)
    fixed.batch_invariant = True
    for shape in shapes:
        for dtype in (torch.float32,) if QUICK else (torch.float32, BF16):
            if dtype == torch.float32 and shape[0] == 128:
                continue
            layout = make_layout(*shape, interleaved=True)
            batch, blocks = make_batch(contexts, [])
            cache, _ = make_cache(layout, blocks, dtype)
            both = rand(len(contexts), layout.heads * layout.query + layout.cached, dtype=dtype)
            q, kv = both[:, : -layout.cached], both[:, -layout.cached :]
            up = rand(layout.heads, layout.plain + layout.value, layout.latent, dtype=dtype, scale=0.1)
            weights = LatentWeights(rand(layout.latent, dtype=dtype), 1e-6, up)
            table = positions_table(layout.rotary, 3001)
            theirs = cache.clone()
            with poisoned_outputs():
                whole = fixed.latent_attention(q, kv, layout, weights, table, batch, cache)
            want = ReferenceOps().latent_attention(q, kv, layout, weights, table, batch, theirs, None)
            check(f"fixed {shape} {dtype}", whole, want, 1e-4 if dtype == torch.float32 else 2e-2)
            for first, last in ((0, 1), (1, 2), (1, 5), (3, 4)):
                some = slice(first, last)
                few = dataclasses.replace(
                    batch, positions=batch.positions[some], slots=batch.slots[some], rows=batch.rows[some],
                    context_lens=batch.context_lens[some], num_decodes=last - first,
                    query_starts=batch.query_starts[: last - first + 1],
                )  # fmt: skip
                part = fixed.latent_attention(q[some], kv[some], layout, weights, table, few, cache)
                assert torch.equal(part, whole[some]), (shape, dtype, first, last)


def test_an_engine_in_deterministic_mode() -> None:
    if MODE != "device":
        return
    for dtype in ("float32", "bfloat16"):
        weights = RandomCheckpoint({**CONFIG, **MODELS["v3"]}, seed=5, dtype=getattr(torch, dtype), embedding_scale=1.0)
        settings = EngineConfig(
            model="random", device="cuda", dtype=dtype, deterministic=True, max_running=16, num_blocks=400
        )
        alone = Engine.load(settings, checkpoint=weights)
        requests = [greedy(f"r{n}", [rng.randrange(199) for _ in range(n)], 24) for n in (1, 17, 130, 300)]
        expected = {}
        for request in requests:
            expected |= generate(alone, request)
        for budget in (512, 64, 7):
            engine = Engine.load(dataclasses.replace(settings, token_budget=budget), checkpoint=weights)
            assert generate(engine, *requests) == expected, (dtype, budget)


def test_launches_of_a_decode_step() -> None:
    """Few tokens: queries and cache, shares, and values in the merge. More: values in a launch of their own."""
    if MODE == "compile":
        return
    layout = make_layout(4, 32, 16, 8, 20, True)
    for sequences, wanted in ((1, 3), (latent_decode.FEW, 3), (latent_decode.FEW + 1, 4)):
        batch, blocks = make_batch([20] * sequences, [])
        cache, _ = make_cache(layout, blocks, torch.float32)
        weights = LatentWeights(rand(32), 1e-6, rand(4, 36, 32))
        q, kv = rand(sequences, 4 * 24), rand(sequences, 40)
        launched = []

        def launch(kernel: Any, *args: Any, launched: list[str] = launched, **options: Any) -> None:
            launched.append(kernel.fn.__name__)
            common.launch(kernel, *args, **options)

        with contextlib.ExitStack() as stack:
            for module in (latent_query, latent_decode, latent_values):
                stack.enter_context(patch.object(module, "launch", launch))
            ops.latent_attention(q, kv, layout, weights, positions_table(8, 64), batch, cache)
        assert len(launched) == wanted, (sequences, launched)


def latent_calls(
    heads: int, sequences: int, context: int, ops: TritonOps, copies: int = 2
) -> tuple[list[Callable[[], Tensor]], int]:
    """Attention of one decode step in DeepSeek's sizes, on several caches and weights, and the bytes that it reads."""
    layout = make_layout(heads, 512, 128, 64, 128, True)
    table = positions_table(64, context + 1)
    calls = []
    for _ in range(copies):
        batch, blocks = make_batch([context] * sequences, [])
        cache, _ = make_cache(layout, blocks, BF16)
        q, kv = rand(sequences, heads * 192, dtype=BF16), rand(sequences, 576, dtype=BF16)
        weights = LatentWeights(rand(512, dtype=BF16), 1e-6, rand(heads, 256, 512, dtype=BF16, scale=0.1))
        calls.append(partial(ops.latent_attention, q, kv, layout, weights, table, batch, cache))
    return calls, sequences * context * 576 * 2 + heads * 256 * 512 * 2


def bench_decode_over_latents() -> Iterator[Row]:
    """DeepSeek V2 Lite (16 heads) and V3 (128 heads) at several loads, with the share of what reading alone takes.
    `dependent`: launches that may begin before the ones before them end."""
    bound = probe(DEVICE, BF16).read_gbps if MODE == "device" else 1.0
    loads = [(16, sequences, context) for sequences in (1, 64) for context in (512, 4096, 32768)]
    for heads, sequences, context in (*loads, (128, 1, 4096), (128, 64, 4096)):
        for pdl in (False, True) if sequences == 1 else (False,):
            # Several copies, so that little of it comes from the L2 cache.
            calls, read = latent_calls(
                heads, sequences, context, TritonOps(DEVICE, pdl=pdl), 8 if sequences == 1 else 2
            )
            us = time_us(calls)
            name = f"latents {heads} heads, {sequences} x {context}{' dependent' if pdl else ''}"
            _, us, rate = bandwidth(name, us, read)
            yield name, us, f"{rate}, {read / bound / us / 10 if us else 0:.0f}% of the read bound"


def bench_parts_of_a_decode_over_latents() -> Iterator[Row]:
    """Each launch of one sequence by itself, DeepSeek V2 Lite."""
    layout = make_layout(16, 512, 128, 64, 128, True)
    for context in (512, 4096):
        batch, blocks = make_batch([context], [])
        table = positions_table(64, context + 1)
        queries, attended = [], []
        for _ in range(8):
            cache, _ = make_cache(layout, blocks, BF16)
            q, kv = rand(1, 16 * 192, dtype=BF16), rand(1, 576, dtype=BF16)
            weights = LatentWeights(rand(512, dtype=BF16), 1e-6, rand(16, 256, 512, dtype=BF16, scale=0.1))
            made, out = rand(1, 16, 576, dtype=BF16), rand(1, 16 * 128, dtype=BF16)
            config = latent_decode.choose(1, layout, 2, ops.processors)
            queries.append(partial(latent_query.prepare, q, kv, layout, weights, table, batch, cache, None))
            attended.append(
                partial(latent_decode.decode, made, layout, weights, batch, cache, None, config, values=out)
            )
        yield bandwidth(f"latents: queries and cache, 1 x {context}", time_us(queries), 16 * 128 * 512 * 2)
        size = context * 576 * 2 + 16 * 128 * 512 * 2
        yield bandwidth(f"latents: shares and merge, 1 x {context}", time_us(attended), size)


def tune_decode_over_latents() -> Iterator[Row]:
    """Shapes of the launch at one sequence and at 64."""
    layout = make_layout(16, 512, 128, 64, 128, True)
    sweeps = [
        (1, 512, [(32, 4, 3), (64, 8, 2), (32, 8, 3)], [(128, 32), (128, 64)]),
        (1, 4096, [(32, 4, 3), (64, 8, 2), (32, 8, 3)], [(32, 64), (64, 64), (128, 64)]),
        (1, 32768, [(32, 4, 3), (64, 8, 2)], [(32, 64), (128, 64)]),
        (64, 4096, [(32, 4, 3), (64, 8, 2)], [(2, 256), (4, 256), (8, 256)]),
    ]
    for sequences, context, tiles, shares in sweeps:
        cases = []
        for _ in range(8 if sequences == 1 else 2):
            batch, blocks = make_batch([context] * sequences, [])
            cache, _ = make_cache(layout, blocks, BF16)
            weights = LatentWeights(rand(512, dtype=BF16), 1e-6, rand(16, 256, 512, dtype=BF16, scale=0.1))
            seen = rand(sequences, 16, 512, dtype=BF16)
            cases.append((rand(sequences, 16, 576, dtype=BF16), layout, weights, batch, cache, None, seen))
        for block_n, warps, stages in tiles:
            for splits, tokens in shares:
                config = LatentTile(16, block_n, warps, stages, splits, max(1, tokens // block_n))
                calls = [partial(latent_decode.decode, *case[:-1], config, seen=case[-1]) for case in cases]
                name = f"tune latents {sequences} x {context} n{block_n} w{warps} s{stages} splits{splits} min{tokens}"
                yield bandwidth(name, time_us(calls, repeats=5), sequences * context * 576 * 2)
