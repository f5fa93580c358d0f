"""Paged attention: decode, prefill, mixed; against float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from attention_cases import (
    BLOCK,
    DTYPES,
    FP8,
    INT8,
    LLAMA,
    SHAPES,
    Case,
    attention64,
    build,
    layout,
    ops,
    prefill_flops,
    run_case,
)
from gpu_harness import (
    MODE,
    QUICK,
    Row,
    arithmetic,
    bandwidth,
    check,
    check_equal,
    poison_,
    poisoned_outputs,
    rng,
    time_us,
)

from penstock.engine.backends.cuda.kernels import decode, hopper_prefill, prefill
from penstock.engine.backends.interface import HeadLayout


def test_decode_attention() -> None:
    for heads, kv_heads, dim in SHAPES:
        for dtype in DTYPES[:1] + DTYPES[2:] if QUICK else DTYPES:
            top = 90 if QUICK else 900
            contexts = [1, 16, 17] + [rng.randrange(1, top) for _ in range(1 if QUICK else 5)]
            case = build([1] * len(contexts), contexts, layout(heads, kv_heads, dim), dtype)
            run_case(f"decode {heads}/{kv_heads}x{dim} {dtype}", case)


def test_decode_with_a_sliding_window() -> None:
    for window in (1, 20, 64) if QUICK else (1, 20, 64, 128, 1000):
        contexts = [1, 70, 131] if QUICK else [1, 70, 131, 2000, 1000, 1001]
        for heads, kv_heads, dim in SHAPES[:2]:
            case = build([1] * len(contexts), contexts, layout(heads, kv_heads, dim, window), torch.bfloat16)
            run_case(f"decode window {window}", case)


def test_decode_in_chunks() -> None:
    for chunk in (20,) if QUICK else (1, 20, 64, 128, 1000):
        contexts = [1, 60, 61] if QUICK else [1, 64, 65, 131, 2000, 1000, 1001, 5121]
        chunked = dataclasses.replace(layout(*SHAPES[0], chunk), chunked=True)
        for kv_dtype in (torch.bfloat16,) if QUICK else (torch.bfloat16, FP8, INT8):
            case = build([1] * len(contexts), contexts, chunked, torch.bfloat16, kv_dtype)
            run_case(f"decode chunk {chunk} {kv_dtype}", case, tolerance=None if kv_dtype == torch.bfloat16 else 2e-2)


def test_prefill_in_chunks() -> None:
    """Tiles that lie in one chunk, or across the edge between two."""
    for chunk in (20,) if QUICK else (1, 20, 64, 300, 1024):
        queries = [2, 50] if QUICK else [2, 50, 333, 128, 2000]
        contexts = [n + extra for n, extra in zip(queries, (90, 0, 77, 700, 48), strict=False)]
        chunked = dataclasses.replace(layout(*SHAPES[0], chunk), chunked=True)
        for dtype in (torch.bfloat16,) if QUICK else (torch.bfloat16, torch.float32):
            run_case(f"prefill chunk {chunk} {dtype}", build(queries, contexts, chunked, dtype))


def test_decode_grid_sized_by_the_models_bound() -> None:
    """Under a CUDA graph the host knows only the longest possible context; the result must not change."""
    contexts = [5, 150] if QUICK else [5, 150, 3000, 1025, 128]
    case = build([1] * len(contexts), contexts, layout(4, 2, 32), torch.bfloat16, max_context=131072)
    run_case("decode, bound 131072", case)


def test_decode_long_context() -> None:
    if QUICK:
        return
    for count, context in ((1, 131072), (3, 40000), (40, 9000)):
        case = build([1] * count, [context - 3 * i for i in range(count)], layout(8, 2, 128), torch.bfloat16)
        run_case(f"decode {count} x {context}", case)


def test_decode_over_many_sequences() -> None:
    if QUICK:
        return
    for count in (64, 200, 256):
        contexts = [rng.randrange(1, 700) for _ in range(count)]
        contexts[3] = 5000
        case = build([1] * count, contexts, layout(32, 8, 128), torch.bfloat16)
        run_case(f"decode {count} sequences", case)


def test_decode_of_long_sequences_beside_short_ones() -> None:
    """Each has shares of its own length: few long ones, or many short ones."""
    if QUICK:
        return
    for count in (1, 3, 4, 8):
        contexts = [*(9000, 40000, 100, 8192, 8193, 1, 20001, 16000)[:count]]
        run_case(f"decode {contexts}", build([1] * count, contexts, layout(32, 8, 128), torch.bfloat16))


def test_decode_of_padding_is_zero() -> None:
    case = build([1, 1, 1], [5, 7, 9], layout(4, 2, 32), torch.bfloat16)
    case.batch.context_lens[1:] = 0
    case.batch.rows[1] = -1
    with poisoned_outputs():
        got = ops.attention(case.q, case.layout, case.batch, case.k_cache, case.v_cache)
    check_equal("padding", got[1:], torch.zeros_like(got[1:]))


def test_prefill_attention() -> None:
    for heads, kv_heads, dim in SHAPES:
        for dtype in DTYPES[:1] + DTYPES[2:] if QUICK else DTYPES:
            queries = [2, 37, 16] if QUICK else [2, 3, 130, 64, 16, rng.randrange(2, 400), 257]
            prefix = [0, 20, 100] if QUICK else [0, 500, 0, 100, 1000, rng.randrange(300), 31]
            contexts = [a + b for a, b in zip(queries, prefix, strict=True)]
            case = build(queries, contexts, layout(heads, kv_heads, dim), dtype)
            run_case(f"prefill {heads}/{kv_heads}x{dim} {dtype}", case)


def test_heads_of_512() -> None:
    """Gemma 4's, in layers that see everything."""
    for dtype in DTYPES[:1] + DTYPES[2:]:
        for heads, kv_heads in ((4, 2),) if QUICK else ((32, 4), (8, 1)):
            of = layout(heads, kv_heads, 512)
            run_case(f"decode {heads}/{kv_heads}x512 {dtype}", build([1, 1], [5, 90], of, dtype))
            queries, contexts = ([2, 19], [22, 19]) if QUICK else ([2, 130, 64], [500, 130, 164])
            run_case(f"prefill {heads}/{kv_heads}x512 {dtype}", build(queries, contexts, of, dtype))


def test_prefill_on_hopper() -> None:
    """Chunks that end inside a block, a tile or exactly at its edge, over poisoned slots; groups that do not divide."""
    if QUICK:  # the interpreter does not know Gluon
        return
    batches = [
        ([1, 70], [40, 70]),
        ([130], [130]),
        ([128], [256]),
        ([17, 300, 500], [1017, 5000, 900]),
        ([33, 65, 129], [33, 127, 1152]),
    ]
    for heads, kv_heads in ((32, 8), (8, 8), (28, 4), (9, 3), (32, 1)):
        for queries, contexts in batches:
            for dtype in (torch.bfloat16, torch.float16):
                case = build(queries, contexts, layout(heads, kv_heads, 128), dtype)
                out = poison_(torch.empty_like(case.q.flatten(1)))
                hopper_prefill.prefill_attention(case.q, case.layout, case.batch, case.k_cache, case.v_cache, out)
                if MODE != "compile":
                    first = case.batch.num_decodes
                    check(f"hopper {heads}/{kv_heads} {contexts} {dtype}", out[first:], attention64(case)[first:])


def test_prefill_on_hopper_with_any_scale() -> None:
    """Rows whose first tile is all masked, for factors of scores that round up and such that round down."""
    if QUICK:  # the interpreter does not know Gluon
        return
    for scale in (1 / 128, 1 / 16, 0.1, 128**-0.5, 0.09, 1.0):
        case = build([300, 500], [5000, 900], HeadLayout(32, 8, 128, scale, None), torch.bfloat16)
        out = poison_(torch.empty_like(case.q.flatten(1)))
        hopper_prefill.prefill_attention(case.q, case.layout, case.batch, case.k_cache, case.v_cache, out)
        if MODE != "compile":
            check(f"hopper, scale {scale}", out, attention64(case))


def test_prefill_with_a_sliding_window() -> None:
    for window in (1, 20, 64) if QUICK else (1, 20, 64, 300):
        queries = [2, 50] if QUICK else [2, 50, 333, 128]
        contexts = [n + extra for n, extra in zip(queries, (90, 0, 77, 700), strict=False)]
        case = build(queries, contexts, layout(*SHAPES[0], window), torch.bfloat16)
        run_case(f"prefill window {window}", case)


def test_prefill_of_many_sequences() -> None:
    """More sequences than one lookup pass holds."""
    count = 3 if QUICK else 300
    queries = [rng.randrange(2, 20) for _ in range(count)]
    case = build(queries, [n + rng.randrange(50) for n in queries], layout(4, 2, 32), torch.bfloat16)
    run_case(f"prefill {count} sequences", case)


def test_mixed_batch() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        queries = [1, 1, 1, 9, 33] if QUICK else [1] * 30 + [9, 200, 2, 77]
        contexts = [n + rng.randrange(60 if QUICK else 900) for n in queries]
        case = build(queries, contexts, layout(*SHAPES[0]), dtype)
        run_case(f"mixed {dtype}", case)


def test_soft_cap() -> None:
    """Decodes and prompts, with and without a window; scores far beyond the cap."""
    queries, contexts = ([1, 1, 20], [9, 70, 100]) if QUICK else ([1, 1, 1, 300, 20], [9, 70, 2000, 300, 1500])
    for window in (None, 33):
        for dtype in (torch.bfloat16, torch.float32):
            capped = HeadLayout(4, 2, 64, 0.5, window, softcap=3.0)
            run_case(f"soft cap, window {window} {dtype}", build(queries, contexts, capped, dtype))


def test_fp8_cache() -> None:
    for queries in ([1, 1, 1], [1, 1, 20, 5]):
        contexts = [n + rng.randrange(100) for n in queries]
        for shape in SHAPES[:2]:
            case = build(queries, contexts, layout(*shape), torch.bfloat16, FP8)
            run_case(f"fp8 cache {shape}", case, 1e-2)


def test_int8_cache() -> None:
    for queries in ([1, 1, 1], [1, 1, 20, 5]):
        contexts = [n + rng.randrange(100) for n in queries]
        for shape in SHAPES[:2]:
            for window in (None, 30):
                for dtype in (torch.bfloat16, torch.float32):
                    case = build(queries, contexts, layout(*shape, window), dtype, INT8)
                    run_case(f"int8 cache {shape} window {window} {dtype}", case)


def test_behind_the_window_anything_may_lie() -> None:
    """Blocks behind a sliding window are given away while the sequence runs; its table still names them."""
    for kv_dtype in (torch.bfloat16, INT8, FP8):
        for queries in ([1, 1, 1], [20, 5]):
            contexts = [150 + n for n in queries]
            case = build(queries, contexts, layout(*SHAPES[0], 40), torch.bfloat16, kv_dtype)
            want = attention64(case) if MODE != "compile" else case.q.flatten(1)
            for row in case.batch.rows.tolist() if MODE != "compile" else ():
                given_away = case.batch.block_tables[row][: (150 - 40 + 1) // BLOCK].long()
                for cache in (case.k_cache, case.v_cache):
                    cache.view(torch.uint8)[given_away] = poison_(cache[given_away]).view(torch.uint8)
                for scale in case.scales or ():
                    if scale.dim() == 3:
                        scale[given_away] = float("nan")
            with poisoned_outputs():
                got = ops.attention(case.q, case.layout, case.batch, case.k_cache, case.v_cache, case.scales)
            check(f"poison behind the window, {kv_dtype}", got, want, 1e-2)


def decode_cases(count: int, context: int, shape: HeadLayout, kv: torch.dtype | None = None) -> list[Case]:
    bound = max(8192, context)
    size = count * context * shape.kv_heads * shape.head_dim * 4
    copies = max(1, min(8, 300_000_000 // size))
    return [build([1] * count, [context] * count, shape, torch.bfloat16, kv, bound) for _ in range(copies)]


def decode_bytes(cases: list[Case]) -> float:
    case = cases[0]
    per_token = 2 * case.layout.kv_heads * case.layout.head_dim * case.k_cache.element_size()
    return float(sum(case.contexts) * per_token + 4 * case.q.numel())


def bench_decode() -> Iterator[Row]:
    for count, context in (
        (1, 512),
        (1, 8192),
        (1, 131072),
        (4, 30000),
        (8, 2048),
        (8, 30000),
        (32, 16000),
        (64, 512),
        (64, 2048),
        (256, 512),
        (256, 2048),
    ):
        cases = decode_cases(count, context, LLAMA)
        us = time_us([lambda c=c: ops.attention(c.q, c.layout, c.batch, c.k_cache, c.v_cache) for c in cases])
        yield bandwidth(f"decode {count} x {context}, 32/8x128", us, decode_bytes(cases))
    mixed = [rng.randrange(100, 2048) for _ in range(256)]
    cases = [build([1] * 256, mixed, LLAMA, torch.bfloat16, max_context=8192)]
    us = time_us([lambda c=c: ops.attention(c.q, c.layout, c.batch, c.k_cache, c.v_cache) for c in cases])
    yield bandwidth("decode 256 x 100..2048, 32/8x128", us, decode_bytes(cases))
    cases = decode_cases(256, 1024, LLAMA, FP8)
    us = time_us([lambda c=c: ops.attention(c.q, c.layout, c.batch, c.k_cache, c.v_cache, c.scales) for c in cases])
    yield bandwidth("decode 256 x 1024, 32/8x128, fp8 cache", us, decode_bytes(cases))
    qwen = layout(16, 8, 128)
    cases = decode_cases(256, 1024, qwen)
    us = time_us([lambda c=c: ops.attention(c.q, c.layout, c.batch, c.k_cache, c.v_cache) for c in cases])
    yield bandwidth("decode 256 x 1024, 16/8x128", us, decode_bytes(cases))


def bench_decode_over_quantized() -> Iterator[Row]:
    """Long conversations, as agents have them; what is read is half as much as in bf16."""
    for count, context in ((1, 30000), (4, 30000), (8, 30000), (16, 16000), (32, 30000)):
        for name, kv in (("bf16", None), ("fp8", FP8), ("int8", INT8)):
            cases = decode_cases(count, context, LLAMA, kv)
            us = time_us(
                [lambda c=c: ops.attention(c.q, c.layout, c.batch, c.k_cache, c.v_cache, c.scales) for c in cases]
            )
            yield bandwidth(f"decode {count} x {context}, 32/8x128, {name} cache", us, decode_bytes(cases))


def bench_prefill() -> Iterator[Row]:
    for count, length, prefix in (
        (1, 1024, 0),
        (8, 1024, 0),
        (4, 2048, 0),
        (1, 8192, 0),
        (4, 2048, 6144),
        (1, 8192, 21808),
        (1, 8192, 91808),
    ):
        case = build([length] * count, [length + prefix] * count, LLAMA, torch.bfloat16)
        us = time_us([lambda c=case: ops.attention(c.q, c.layout, c.batch, c.k_cache, c.v_cache)])
        yield arithmetic(f"prefill {count} x {length} after {prefix}, 32/8x128", us, prefill_flops(case))


def tune_decode() -> Iterator[Row]:
    wide, narrow = (128, 4, 3), (64, 4, 3)
    sweeps: list[tuple[int, int, torch.dtype | None, list[tuple[int, int, int]], list[tuple[int, int]]]] = [
        (1, 512, None, [wide, narrow], [(32, 64), (32, 128), (16, 256)]),
        (1, 2048, None, [wide, narrow], [(32, 128), (16, 256), (16, 128)]),
        (8, 1024, None, [wide, narrow], [(8, 128), (8, 256), (4, 512)]),
        (16, 1024, None, [wide, narrow], [(8, 128), (4, 256), (4, 512)]),
        (32, 1024, None, [wide, narrow], [(4, 256), (4, 512), (4, 1024)]),
        (64, 512, None, [wide, narrow], [(4, 256), (4, 512)]),
        (256, 1024, FP8, [wide, narrow, (64, 4, 5), (128, 4, 5)], [(4, 1024)]),
    ]
    for count, context, kv, tiles, shares in sweeps:
        cases = decode_cases(count, context, LLAMA, kv)
        outs = [torch.empty_like(c.q) for c in cases]
        for block_n, warps, stages in tiles:
            for splits, tokens in shares:
                config = decode.DecodeConfig(block_n, warps, stages, splits, max(1, tokens // block_n), splits)
                us = time_us(
                    [
                        lambda c=c, o=o, g=config: decode.decode_attention(
                            c.q, c.layout, c.batch, c.k_cache, c.v_cache, o, ops._counters, g, c.scales
                        )
                        for c, o in zip(cases, outs, strict=True)
                    ],
                    repeats=5,
                )
                shape = f"{'fp8 ' if kv else ''}{count}x{context}"
                name = f"tune decode {shape} n{block_n} w{warps} s{stages} splits{splits} min{tokens}"
                yield bandwidth(name, us, decode_bytes(cases))


def tune_prefill() -> Iterator[Row]:
    for count, length in ((8, 1024), (1, 8192)):
        case = build([length] * count, [length] * count, LLAMA, torch.bfloat16)
        out = torch.empty_like(case.q)
        for config in (
            prefill.PrefillConfig(128, 64, 8, 5),
            prefill.PrefillConfig(128, 128, 8, 3),
            prefill.PrefillConfig(64, 64, 4, 3),
            prefill.PrefillConfig(64, 64, 4, 5),
            prefill.PrefillConfig(64, 32, 4, 5),
        ):
            us = time_us(
                [
                    lambda c=case, o=out, g=config: prefill.prefill_attention(
                        c.q, c.layout, c.batch, c.k_cache, c.v_cache, o, g
                    )
                ],
                repeats=5,
            )
            name = f"tune prefill {count}x{length} m{config.block_m} n{config.block_n}"
            yield arithmetic(f"{name} w{config.num_warps} s{config.num_stages}", us, prefill_flops(case))
