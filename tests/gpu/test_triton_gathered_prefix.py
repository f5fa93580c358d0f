"""Prompts on Hopper whose keys and values are gathered first, and attention over them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attention_cases import (
    BLOCK,
    FP8,
    INT8,
    LLAMA,
    Case,
    attention64,
    build,
    dense64,
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
    checked_addresses,
    poison_,
    poisoned_outputs,
    time_us,
)

from penstock.engine.backends.cuda import long_prompts
from penstock.engine.backends.cuda.kernels import gathered_prefix, hopper_prefill, prefill
from penstock.engine.backends.cuda.kernels.common import is_building
from penstock.engine.backends.interface import HeadLayout, attended
from penstock.engine.request import Request, SamplingParams
from penstock.errors import ConfigError
from tests.engine.harness import drain, greedy, make_engine
from tests.engine.tiny import write_checkpoint

QUANTIZED = ((FP8, torch.bfloat16), (FP8, torch.float16), (INT8, torch.bfloat16))


def test_a_prefix_is_gathered() -> None:
    """Every key and value of every prompt at its place, in any number of turns; nothing else is read or written."""
    queries = [1, 1, 3, 20, 2] if QUICK else [1, 1, 3, 200, 2, 17]
    contexts = [9, 40, 127, 20, 130] if QUICK else [9, 40, 128, 200, 1300, 129]
    for kv_heads, dim in ((3, 32), (2, 16)) if QUICK else ((8, 128), (3, 128), (1, 64)):
        for kv_dtype, dtype in (*QUANTIZED, (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)):
            case = build(queries, contexts, layout(kv_heads, kv_heads, dim), dtype, kv_dtype)
            k_scale, v_scale = case.scales or (None, None)
            for heads in {1, kv_heads - 1 or 1, kv_heads}:
                with poisoned_outputs(), checked_addresses(gathered_prefix):
                    room = gathered_prefix.make_room(case.layout, case.batch, dtype, heads)
                    for first in range(0, kv_heads, heads):
                        some = min(heads, kv_heads - first)
                        gathered_prefix.gather(room, first, some, case.batch, case.k_cache, case.v_cache, case.scales)
                        for cache, scale, got in (
                            (case.k_cache, k_scale, room.k),
                            (case.v_cache, v_scale, room.v),
                        ):
                            if MODE != "compile":
                                compare_gathered(case, cache, scale, got, room.bases.tolist(), first, some)


def test_a_prefix_is_gathered_for_products_of_fp8() -> None:
    """Keys as they are kept; values transposed by tile, in an order of tokens in which each appears once."""
    queries = [1, 3, 20, 2] if QUICK else [1, 3, 200, 2, 17]
    contexts = [9, 127, 20, 130] if QUICK else [9, 128, 200, 1300, 129]
    tile = gathered_prefix.TILE
    order = torch.tensor([at & ~15 | (at >> 1 & 1) * 8 | (at >> 2 & 3) * 2 | at & 1 for at in range(tile)])
    assert sorted(order.tolist()) == list(range(tile))
    case = build(queries, contexts, layout(3, 3, 32 if QUICK else 128), torch.bfloat16, FP8)
    decodes = case.batch.num_decodes
    with poisoned_outputs(), checked_addresses(gathered_prefix):
        room = gathered_prefix.make_room(case.layout, case.batch, FP8, 2)
        for first, some in ((0, 2), (2, 1)):
            gathered_prefix.gather(room, first, some, case.batch, case.k_cache, case.v_cache, case.scales)
            if MODE == "compile":
                continue
            prompts = zip(room.bases.tolist(), case.batch.rows[decodes:].tolist(), case.contexts[decodes:], strict=True)
            for base, row, context in prompts:
                blocks = case.batch.block_tables[row][: -(-context // BLOCK)]
                keys = dense64(case.k_cache, None, blocks, context)[first : first + some]
                check_equal("gathered keys", room.k[:some, base : base + context].double(), keys)
                tiles = -(-context // tile)
                values = torch.zeros((some, tiles * tile, keys.shape[2]), dtype=torch.float64, device=keys.device)
                values[:, :context] = dense64(case.v_cache, None, blocks, context)[first : first + some]
                values = values.unflatten(1, (tiles, tile))[:, :, order.to(keys.device)].transpose(2, 3)
                got = room.v[:some, base : base + tiles * tile].reshape(values.shape)
                check_equal("gathered values", got.double(), values)


def compare_gathered(
    case: Case,
    cache: torch.Tensor,
    scale: torch.Tensor | None,
    got: torch.Tensor,
    bases: list[int],
    first: int,
    some: int,
) -> None:
    decodes = case.batch.num_decodes
    written = torch.zeros(got.shape[1], dtype=torch.bool, device=got.device)
    for base, row, context in zip(bases, case.batch.rows[decodes:].tolist(), case.contexts[decodes:], strict=True):
        assert base % gathered_prefix.TILE == 0
        blocks = case.batch.block_tables[row][: -(-context // BLOCK)]
        exact = dense64(cache, scale if cache.dtype == INT8 else None, blocks, context)[first : first + some]
        mine = got[:some, base : base + context]
        if cache.dtype == INT8:
            check(f"gathered {cache.dtype}", mine, exact)
        else:
            check_equal(f"gathered {cache.dtype}", mine.double(), exact)
        written[base : base + context] = True
    assert bool(got[:some, ~written].isnan().all()), "rows behind a sequence were written"


def test_prefixes_take_bounded_room() -> None:
    case = build([2, 2], [300, 5], layout(8, 8, 128), torch.bfloat16)
    for context, want in ((1000, 8), (131072, 3), (400_000, 1), (4_000_000, 0), (None, 0)):
        batch = dataclasses.replace(case.batch, total_context=context)
        heads = gathered_prefix.heads_at_once(case.layout, batch, 2)
        assert heads == want, (context, heads)
        if context is not None and heads:
            assert gathered_prefix.rows_of(batch) * heads * 128 * 4 <= gathered_prefix.MOST_BYTES


def test_prefill_on_hopper_over_a_quantized_cache() -> None:
    """Gathered in one turn and in several, beside decodes, over poisoned slots; groups that do not divide."""
    if QUICK:  # the interpreter does not know Gluon
        return
    batches = [([1, 70], [40, 70]), ([128], [256]), ([1, 17, 300, 500], [5, 1017, 5000, 900]), ([33, 65], [33, 127])]
    kinds_of = ((32, 8, QUANTIZED), (28, 4, QUANTIZED[:1]), (9, 3, QUANTIZED[2:]), (32, 1, QUANTIZED[:1]))
    for heads, kv_heads, kinds in kinds_of:
        for queries, contexts in batches:
            for kv_dtype, dtype in kinds:
                case = build(queries, contexts, layout(heads, kv_heads, 128), dtype, kv_dtype)
                for turns in {1, min(3, kv_heads)}:
                    out = poison_(torch.empty_like(case.q.flatten(1)))
                    with gathered_in(turns, case), poisoned_outputs():
                        hopper_prefill.prefill_attention(
                            case.q, case.layout, case.batch, case.k_cache, case.v_cache, out, case.scales
                        )
                    if MODE != "compile":
                        first = case.batch.num_decodes
                        name = f"hopper {kv_dtype} {heads}/{kv_heads} {contexts} {dtype}, {turns} turns"
                        check(name, out[first:], attention64(case)[first:], 1e-2)


def test_prefill_on_hopper_in_fp8() -> None:
    """Products of FP8 over an FP8 cache; as exact over 70,000 tokens as over a few."""
    if QUICK:  # the interpreter does not know Gluon
        return
    batches = [([1, 70], [40, 70]), ([128], [256]), ([1, 17, 300, 500], [5, 1017, 5000, 900]), ([33, 65], [33, 127])]
    for heads, kv_heads in ((32, 8), (28, 4), (9, 3), (32, 1)):
        for queries, contexts in [*batches, ([40], [70_000])]:
            for dtype in (torch.bfloat16, torch.float16):
                case = build(queries, contexts, layout(heads, kv_heads, 128), dtype, FP8)
                for turns in {1, min(3, kv_heads)}:
                    out = poison_(torch.empty_like(case.q.flatten(1)))
                    with gathered_in(turns, case), poisoned_outputs():
                        hopper_prefill.prefill_attention(
                            case.q, case.layout, case.batch, case.k_cache, case.v_cache, out, case.scales, fp8=True
                        )
                    if MODE != "compile":
                        first = case.batch.num_decodes
                        want = attention64(case)[first:]
                        error = float((out[first:].double() - want).norm() / want.norm())
                        name = f"hopper fp8 {heads}/{kv_heads} {contexts} {dtype}, {turns} turns"
                        print(f"    {name}: {error:.4f} of the norm")
                        assert error < 0.08, name


@contextlib.contextmanager
def gathered_in(turns: int, case: Case) -> Iterator[None]:
    """Room for so few heads that all take `turns`."""
    kept = gathered_prefix.MOST_BYTES
    heads = -(-case.layout.kv_heads // turns)
    gathered_prefix.MOST_BYTES = gathered_prefix.rows_of(case.batch) * heads * case.layout.head_dim * 4
    try:
        yield
    finally:
        gathered_prefix.MOST_BYTES = kept


@contextlib.contextmanager
def least_reuse(tokens: float) -> Iterator[None]:
    """16-bit keys are gathered where so many new tokens read each."""
    kept, hopper_prefill.LEAST_REUSE = hopper_prefill.LEAST_REUSE, tokens
    try:
        yield
    finally:
        hopper_prefill.LEAST_REUSE = kept


def test_16_bit_keys_are_gathered_where_each_is_read_often() -> None:
    for queries, contexts, want in (
        ([3200], [100_000], 8),
        ([3000], [100_000], 0),
        ([4656, 3792], [30_000, 3792], 8),  # the end of one prompt and the beginning of the next
        ([512, 7936], [30_000, 7936], 0),
        ([1] * 8 + [8440], [30_000] * 8 + [8440], 8),
    ):
        decodes, total = queries.count(1), sum(n for n, new in zip(contexts, queries, strict=True) if new > 1)
        starts = np.cumsum([0, *queries])
        case = build([2] * decodes + [2], [40] * decodes + [40], LLAMA, torch.bfloat16)
        batch = dataclasses.replace(
            case.batch,
            num_decodes=decodes,
            max_query=max(queries),
            total_context=total,
            attended=attended(starts, np.array(contexts), decodes),
        )
        heads = hopper_prefill._heads_gathered(LLAMA, batch, case.q, case.k_cache)
        assert heads == min(want, gathered_prefix.heads_at_once(LLAMA, batch, 2)), (queries, heads)
        captured = dataclasses.replace(batch, total_context=None, attended=None)
        assert hopper_prefill._heads_gathered(LLAMA, captured, case.q, case.k_cache) == 0
    assert hopper_prefill.gathered_bytes(LLAMA, torch.bfloat16) == gathered_prefix.MOST_BYTES
    assert hopper_prefill.gathered_bytes(LLAMA, torch.float32) == 0


def test_prefill_on_hopper_over_gathered_16_bits() -> None:
    """The same numbers as from the blocks themselves, bit for bit: both multiply the same tiles in the same order."""
    if QUICK:  # the interpreter does not know Gluon
        return
    batches = [([1, 70], [40, 70]), ([128], [256]), ([1, 17, 300, 500], [5, 1017, 5000, 900]), ([33, 65], [33, 127])]
    layouts = [layout(32, 8, 128), layout(28, 4, 128), layout(9, 3, 128), layout(32, 1, 128)]
    layouts += [HeadLayout(32, 8, 128, scale, None) for scale in (1 / 16, 1.0)]
    for heads in layouts:
        for queries, contexts in batches:
            for dtype in (torch.bfloat16, torch.float16):
                case = build(queries, contexts, heads, dtype)
                with least_reuse(math.inf):
                    first, want = case.batch.num_decodes, attend(case)
                for turns in {1, min(3, heads.kv_heads)}:
                    with least_reuse(0), gathered_in(turns, case), counted_gathers() as gathered:
                        got = attend(case)
                    wanted = -(-heads.kv_heads // -(-heads.kv_heads // turns))
                    assert MODE == "compile" or len(gathered) == wanted  # what is only built is not counted
                    name = f"gathered {dtype} {heads.heads}/{heads.kv_heads} {contexts}, {turns} turns"
                    check_equal(name, got[first:], want[first:])
                if MODE != "compile":
                    check(f"paged {dtype} {contexts}", want[first:], attention64(case)[first:], 1e-2)


def test_what_is_left_to_others() -> None:
    """Windows inside the context, sinks, other head sizes: the portable kernel, however often keys are read."""
    queries, contexts = ([2, 30], [40, 60]) if QUICK else ([600, 2], [900, 700])
    shapes = ((4, 2, 32),) if QUICK else ((8, 2, 128), (8, 2, 64), (4, 2, 256))
    for heads, kv_heads, dim in shapes:
        for window in (None, 20, 4096):
            for sinks in (False, True):
                case = build(queries, contexts, layout(heads, kv_heads, dim, window), torch.bfloat16, sinks=sinks)
                with least_reuse(0):
                    run_case(f"{heads}/{kv_heads}x{dim}, window {window}, sinks {sinks}", case)


def attend(case: Case) -> torch.Tensor:
    out = poison_(torch.empty_like(case.q.flatten(1)))
    with poisoned_outputs():
        hopper_prefill.prefill_attention(case.q, case.layout, case.batch, case.k_cache, case.v_cache, out, case.scales)
    return out


def test_long_prompts_of_an_engine() -> None:
    """In chunks, beside another request: every token of the prompt as likely as with the portable kernel."""
    if MODE != "device":
        return
    rng = random.Random(5)
    with tempfile.TemporaryDirectory() as folder:
        path = _checkpoint(Path(folder))
        prompt = [rng.randrange(199) for _ in range(20_000)]
        for kv_dtype in ("fp8", "int8"):
            with_hopper, gathered = _prompt_logprobs(path, kv_dtype, prompt, hopper=True)
            portable, none = _prompt_logprobs(path, kv_dtype, prompt, hopper=False)
            assert gathered and not none
            difference = (with_hopper - portable).abs()
            print(
                f"    {kv_dtype}: log-probabilities differ by {difference.mean():.4f}, at most {difference.max():.3f}"
            )
            assert not with_hopper.isnan().any() and float(difference.mean()) < 0.02
        exact, _ = _prompt_logprobs(path, "fp8", prompt, hopper=True)
        in_fp8, some = _prompt_logprobs(path, "fp8", prompt, hopper=True, fp8_attention=True)
        difference = (in_fp8 - exact).abs()
        print(f"    attention in FP8: they differ by {difference.mean():.4f}, at most {difference.max():.3f}")
        assert some and not in_fp8.isnan().any() and 0 < float(difference.mean()) < 0.02
        with least_reuse(math.inf):
            paged, none = _prompt_logprobs(path, "auto", prompt, hopper=True)
        with least_reuse(1024):
            gathered_16, some = _prompt_logprobs(path, "auto", prompt, hopper=True)
        assert some and not none
        assert float((gathered_16 - paged).abs().max()) < 1e-3, "the same arithmetic from another place"


def test_attention_in_fp8_is_refused_where_it_would_do_nothing() -> None:
    if MODE != "device":
        return
    with tempfile.TemporaryDirectory() as folder:
        wide, narrow = _checkpoint(Path(folder) / "wide"), write_checkpoint("llama-gqa", Path(folder) / "narrow")
        for path, settings, reason in (
            (wide, {"kv_dtype": "int8"}, "set kv_dtype: fp8 too"),
            (wide, {"kv_dtype": "fp8", "deterministic": True}, "token by token"),
            (narrow, {"kv_dtype": "fp8"}, "heads of 128"),
        ):
            try:
                make_engine(path, device="cuda", dtype="bfloat16", fp8_attention=True, num_blocks=64, **settings)
            except ConfigError as error:
                assert reason in str(error), error
            else:
                raise AssertionError(f"{settings} was not refused")


def test_captured_steps_gather_too() -> None:
    """Prompts in chunks of up to 1,024 tokens, some of which see more than captured steps have room for; beside the
    portable kernel, which attends in chunks shorter than `LONG_CHUNK`."""
    if MODE != "device":
        return
    rng = random.Random(7)
    lengths = (600, 1500, 3000, 9000, 17_000, 36_000)
    requests = [greedy(f"r{length}", [rng.randrange(199) for _ in range(length)], 4, logprobs=0) for length in lengths]
    with tempfile.TemporaryDirectory() as folder:
        path = _checkpoint(Path(folder), max_position_embeddings=65536)
        for kv_dtype in ("fp8", "int8"):
            known, before = [], []
            for gathers in (False, True):
                kept, long_prompts.LONG_CHUNK = long_prompts.LONG_CHUNK, long_prompts.LONG_CHUNK if gathers else 1 << 30
                try:
                    with counted_gathers() as gathered:
                        engine = make_engine(
                            path,
                            device="cuda",
                            dtype="bfloat16",
                            kv_dtype=kv_dtype,
                            max_running=16,
                            token_budget=1024,
                            kv_memory=192 << 20,
                        )
                        at_start = len(gathered)
                        before.append(at_start)
                        for request in requests:
                            engine.submit(request)
                        first: dict[str, float] = {}
                        for delta in drain(engine):
                            if delta.logprobs and delta.request_id not in first:
                                first[delta.request_id] = delta.logprobs[0].logprob
                        assert (len(gathered) > at_start) == gathers, "the longest prompts are launched"
                finally:
                    long_prompts.LONG_CHUNK = kept
                known.append(torch.tensor([first[request.request_id] for request in requests]))
            assert before[1] > before[0] == 0, "captured before the first request"
            difference = (known[0] - known[1]).abs()
            print(f"    {kv_dtype}: log-probabilities of first tokens differ by at most {difference.max():.4f}")
            assert float(difference.max()) < 0.05


def _checkpoint(folder: Path, max_position_embeddings: int = 32768) -> Path:
    return write_checkpoint(
        "llama-gqa", folder, spread=0.3, head_dim=128, max_position_embeddings=max_position_embeddings
    )


def _prompt_logprobs(
    path: Path, kv_dtype: str, prompt: list[int], *, hopper: bool, **settings: Any
) -> tuple[torch.Tensor, int]:
    """Of every token but the first; and how often keys were gathered."""
    settings |= {"kv_dtype": kv_dtype, "max_running": 4, "token_budget": 3000, "kv_memory": 96 << 20}
    engine = make_engine(path, device="cuda", dtype="bfloat16", **settings)
    attention = engine.runner.decoder.layers[0].mixer.attention_ops
    if not hopper:
        attention.hopper_prefill = None
    with counted_gathers() as gathered:
        engine.submit(greedy("beside", prompt[:40], 30))
        engine.submit(Request("long", prompt, SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=0)))
        known = next(delta.prompt_logprobs for delta in drain(engine) if delta.prompt_logprobs is not None)
    return torch.tensor([place.logprob for place in known[1:] if place is not None]), len(gathered)


@contextlib.contextmanager
def counted_gathers() -> Iterator[list[int]]:
    """The first head of every time that keys are gathered."""
    kept, calls = hopper_prefill.gather, []

    def gather(into: gathered_prefix.GatheredPrefix, first_head: int, *rest: object) -> None:
        if not is_building():
            calls.append(first_head)
        kept(into, first_head, *rest)

    hopper_prefill.gather = gather
    try:
        yield calls
    finally:
        hopper_prefill.gather = kept


def bench_prefill_over_quantized_caches() -> Iterator[Row]:
    """A long chunk over 16-bit, FP8 and int8 keys; the portable kernel beside what is chosen; gathering alone."""
    cases = ((1, 8192, 91808), (1, 8192, 0), (1, 1024, 39936), (8, 1024, 14976))
    for count, length, prefix in cases[:1] if MODE == "compile" else cases:
        for kv in (torch.bfloat16, FP8, INT8):
            case = build([length] * count, [length + prefix] * count, LLAMA, torch.bfloat16, kv)
            name = f"prefill {count} x {length} after {prefix}, {str(kv).removeprefix('torch.')}"
            call = (case.q, case.layout, case.batch, case.k_cache, case.v_cache)
            if MODE == "compile":  # without a device, `ops` does not choose it
                hopper_prefill.prefill_attention(*call, torch.empty_like(case.q), case.scales)
            us = time_us([lambda c=call, k=case: ops.attention(*c, k.scales)], repeats=5)
            yield arithmetic(name, us, prefill_flops(case))
            if kv == torch.bfloat16:
                continue
            if kv == FP8:
                out = torch.empty_like(case.q)
                us = time_us(
                    [lambda c=call, o=out, k=case: hopper_prefill.prefill_attention(*c, o, k.scales, fp8=True)],
                    repeats=5,
                )
                yield arithmetic(f"{name}, products of FP8", us, prefill_flops(case))
            tile, out = prefill.choose(length, length + prefix, 4, 128, 2), torch.empty_like(case.q)
            us = time_us(
                [lambda c=call, o=out, t=tile, k=case: prefill.prefill_attention(*c, o, t, k.scales)], repeats=3
            )
            yield arithmetic(f"{name}, portable kernel", us, prefill_flops(case))
            heads = gathered_prefix.heads_at_once(case.layout, case.batch, 2)
            room = gathered_prefix.make_room(case.layout, case.batch, torch.bfloat16, heads)
            us = time_us(
                [
                    lambda c=case, r=room, h=heads: [
                        gathered_prefix.gather(r, at, min(h, 8 - at), c.batch, c.k_cache, c.v_cache, c.scales)
                        for at in range(0, 8, h)
                    ]
                ],
                repeats=5,
            )
            yield bandwidth(f"{name}, gathered {heads} heads at a time", us, sum(case.contexts) * 8 * 128 * 2 * 3)


SIXTEEN_BITS = (
    (1, 8448, 0), (1, 8448, 8448), (1, 8448, 16896), (1, 4656, 25344), (1, 8448, 33792), (1, 8448, 59136),
    (1, 8448, 91552), (1, 4096, 0), (1, 4096, 28672), (1, 2048, 30720), (1, 1024, 39936), (8, 1024, 14976),
)  # fmt: skip
"""Sequences, new tokens, cached ones: chunks of `long30k` and `long100k`, and some that should not be gathered."""


def bench_16_bit_caches_of_prompts() -> Iterator[Row]:
    """Blocks in order, as a cache that is not worn has them, and scattered: each read through the block table, and
    gathered (copy included); the first again at the end, since clocks change; the copy alone."""
    for count, length, prefix in SIXTEEN_BITS[:1] if MODE == "compile" else SIXTEEN_BITS:
        for order, run in (("in order", 1 << 20), ("scattered", 1)):
            case = build([length] * count, [length + prefix] * count, LLAMA, torch.bfloat16, run=run)
            call = (case.q, case.layout, case.batch, case.k_cache, case.v_cache, torch.empty_like(case.q.flatten(1)))
            for variant in ("paged", "gathered", "paged again"):
                with least_reuse(0 if variant == "gathered" else math.inf):
                    us = time_us([lambda c=call: hopper_prefill.prefill_attention(*c)], repeats=5)
                name = f"16 bits, {count} x {length} after {prefix}, {order}, {variant}"
                yield arithmetic(name, us, prefill_flops(case))
            heads = gathered_prefix.heads_at_once(case.layout, case.batch, 2)
            room = gathered_prefix.make_room(case.layout, case.batch, torch.bfloat16, heads)
            us = time_us(
                [
                    lambda c=case, r=room, h=heads: [
                        gathered_prefix.gather(r, at, min(h, 8 - at), c.batch, c.k_cache, c.v_cache, None)
                        for at in range(0, 8, h)
                    ]
                ],
                repeats=5,
            )
            name = f"16 bits, {count} x {length} after {prefix}, {order}, copy of {heads} heads"
            yield bandwidth(name, us, sum(case.contexts) * 8 * 128 * 2 * 4)
