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
    poisoned_outputs,
    rand,
    time_us,
)
from latent_cases import BF16, CONFIG, MODELS, make_batch, make_cache, make_layout, ops, positions_table
from torch import Tensor

from penstock.bench.bounds import probe
from penstock.engine.adapters.latent import AbsorbedAdapters
from penstock.engine.adapters.layout import AdapterLayout
from penstock.engine.adapters.model_sites import layout_of
from penstock.engine.adapters.peft import random_adapter
from penstock.engine.backends.cuda.kernels import (
    common,
    expert_lora,
    latent_decode,
    latent_prefill,
    latent_query,
    latent_values,
)
from penstock.engine.backends.cuda.kernels.latent_tile import LatentConfig as LatentTile
from penstock.engine.backends.cuda.lora import TritonLora
from penstock.engine.backends.cuda.ops import TritonOps
from penstock.engine.backends.interface import FP8, INT8, AttentionBatch, LatentLayout, LatentWeights
from penstock.engine.backends.reference.ops import ReferenceOps
from penstock.engine.models.families import read_config


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
