"""Prompts over FP8 and int8 caches on Hopper: keys and values gathered into 16 bits, and attention over them."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

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

from penstock.engine.backends.cuda.kernels import gathered_prefix, hopper_prefill, prefill
from penstock.engine.request import Request, SamplingParams
from tests.engine.harness import drain, greedy, make_engine
from tests.engine.tiny import write_checkpoint


def test_a_prefix_is_gathered() -> None:
    """Every key and value of every prompt at its place, in any number of turns; nothing else is read or written."""
    queries = [1, 1, 3, 20, 2] if QUICK else [1, 1, 3, 200, 2, 17]
    contexts = [9, 40, 127, 20, 130] if QUICK else [9, 40, 128, 200, 1300, 129]
    for kv_heads, dim in ((3, 32), (2, 16)) if QUICK else ((8, 128), (3, 128), (1, 64)):
        for kv_dtype, dtype in ((FP8, torch.bfloat16), (FP8, torch.float16), (INT8, torch.bfloat16)):
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
    every = ((FP8, torch.bfloat16), (FP8, torch.float16), (INT8, torch.bfloat16))
    for heads, kv_heads, kinds in ((32, 8, every), (28, 4, every[:1]), (9, 3, every[2:]), (32, 1, every[:1])):
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


def test_long_prompts_of_an_engine() -> None:
    """In chunks, beside another request: every token of the prompt as likely as with the portable kernel."""
    if MODE != "device":
        return
    rng = random.Random(5)
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint("llama-gqa", Path(folder), spread=0.3, head_dim=128, max_position_embeddings=32768)
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


def _prompt_logprobs(path: Path, kv_dtype: str, prompt: list[int], *, hopper: bool) -> tuple[torch.Tensor, int]:
    """Of every token but the first; and how often keys were gathered."""
    engine = make_engine(
        path, device="cuda", dtype="bfloat16", kv_dtype=kv_dtype, max_running=4, token_budget=3000, kv_memory=96 << 20
    )
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
