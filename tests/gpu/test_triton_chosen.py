"""Attention to tokens that an indexer chooses: scores, the choice and the attention, against the plain PyTorch path.

Scores are compared in numbers that float32 adds exactly in any order, so that the same tokens must be chosen, equals
included. Keys and latents of other sequences, and what lies behind a context, are NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from gpu_harness import (
    DEVICE,
    MODE,
    QUICK,
    Row,
    arithmetic,
    bandwidth,
    check,
    checked_addresses,
    integers,
    poisoned_outputs,
    programs_backwards,
    rand,
    rng,
    time_us,
)
from latent_cases import BF16, BLOCK, make_batch, make_cache, make_layout, ops, positions_table
from torch import Tensor

from penstock.engine.backends.cuda import latents
from penstock.engine.backends.cuda.kernels import (
    index_choice,
    index_rows,
    index_scores,
    latent_decode,
    latent_prefill,
    latent_query,
    latent_values,
)
from penstock.engine.backends.cuda.ops import TritonOps
from penstock.engine.backends.interface import (
    FP8,
    INT8,
    AttentionBatch,
    IndexLayout,
    IndexNorm,
    LatentLayout,
    LatentWeights,
)
from penstock.engine.backends.reference.ops import ReferenceOps

INDEX_MODULES = index_rows, index_scores, index_choice
LATENT_MODULES = latent_query, latent_decode, latent_prefill, latent_values


def whole(shape: tuple[int, ...], most: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small whole numbers, of which many are equal."""
    if MODE == "compile":
        return torch.empty(shape, dtype=dtype)
    return torch.randint(-most, most + 1, shape, device=DEVICE).to(dtype)


def no_rotation(rotary: int, positions: int) -> Tensor:
    """cos 1, sin 0: whole numbers stay whole."""
    return torch.cat((torch.ones(positions, rotary // 2), torch.zeros(positions, rotary // 2)), 1).to(DEVICE)


def forget_the_rest(cache: Tensor, batch: AttentionBatch) -> None:
    """NaN wherever no sequence of the step has a token."""
    if MODE == "compile":
        return
    used = torch.zeros(len(cache), dtype=torch.bool)
    for row, context in zip(batch.rows.tolist(), batch.context_lens.tolist(), strict=True):
        table = batch.block_tables[row].cpu()
        used[[int(table[p // BLOCK]) * BLOCK + p % BLOCK for p in range(context)]] = True
    cache[~used.to(cache.device)] = float("nan")


def with_longest(batch: AttentionBatch) -> AttentionBatch:
    return dataclasses.replace(batch, longest=int(batch.context_lens.max()))


def lists_of(chosen: Any, tokens: int) -> list[list[int] | None]:
    """Slots per token; None where all of them are seen."""
    if chosen is None:
        return [None] * tokens
    counts = chosen.seen.clamp(max=chosen.most).tolist()
    return [chosen.slots[t, :count].tolist() if count else None for t, count in enumerate(counts)]


def reference_lists(chosen: Any, batch: AttentionBatch) -> list[list[int] | None]:
    starts = batch.query_starts.tolist()
    found: list[list[int] | None] = [None] * starts[-1]
    for one in chosen:
        for i, t in enumerate(range(starts[one.sequence], starts[one.sequence + 1])):
            found[t] = one.slots[i][one.valid[i]].tolist()
    return found


CASES: list[tuple[int, list[int], list[tuple[int, int]]]] = [
    (8, [9, 8, 7, 40], []),
    (8, [1], [(9, 9), (3, 3), (1, 8), (6, 60)]),
    (16, [], [(2, 33), (22, 22)]),
    (8, [100, 1, 30], [(3, 80)]),
]


def test_the_same_tokens_are_chosen_as_in_plain_torch() -> None:
    # Of sizes whose root is a power of two, so that nothing is rounded.
    shapes = [(4, 16, 8), (16, 4, 4)] if QUICK else [(4, 16, 8), (16, 4, 4), (16, 64, 32), (64, 256, 64)]
    kinds = [torch.float32] if QUICK else [torch.float32, BF16]
    for heads, dim, rotary in shapes:
        for number, (most, decodes, prompts) in enumerate(CASES):
            for dtype in kinds:
                layout = IndexLayout(heads, dim, rotary, most, interleaved=number % 2 == 0)
                batch, blocks = make_batch(decodes, prompts)
                batch, tokens = with_longest(batch), len(batch.positions)
                cache = whole((blocks * BLOCK, dim), 2, dtype)
                forget_the_rest(cache, batch)
                queries, weights = whole((tokens, heads * dim), 1, dtype), whole((tokens, heads), 1)
                table = no_rotation(rotary, 200)
                # Several tiles, shares and parts also where contexts are short.
                small = patch.multiple(index_choice, TILE=32), patch.object(latents, "SCORE_BYTES", 16 * 4 * 128)
                with small[0], small[1], poisoned_outputs(), checked_addresses(*INDEX_MODULES):
                    got = ops.choose_tokens(queries, weights, layout, table, batch, cache, BLOCK)
                if MODE == "compile":
                    continue
                want = ReferenceOps().choose_tokens(queries, weights, layout, table, batch, cache, BLOCK)
                name = (heads, dim, most, decodes, prompts, dtype)
                assert lists_of(got, tokens) == reference_lists(want, batch), name


def test_equal_scores_and_odd_ones() -> None:
    """Of equal scores the earlier count more, also across tiles and shares; zeros of both signs are equal, infinite and
    tiny ones are in order."""
    most, width, block = 24, 256, 4
    rows: list[list[float]] = [
        [0.0] * 200,
        [-0.0, 0.0] * 100,
        [1.0] * 23 + [0.0] * 177,
        [-3.0] * 150 + [float("inf")] * 3 + [-1e-45] * 20 + [1e-45] * 10,
        [float(i % 7) for i in range(230)],
        [-float(i) for i in range(25)],
        [float(i) for i in range(25)],
        [2.0] * 12,
        [rng.choice((-1.5, 2.25, 1e30, -1e30)) for _ in range(256)],
    ]
    seen = [len(row) for row in rows]
    scores = torch.full((len(rows), width), float("nan"))
    for i, row in enumerate(rows):
        scores[i, : len(row)] = torch.tensor(row)
    tables = torch.stack([torch.randperm(width // block) + 1 for _ in rows]).to(torch.int32).to(DEVICE)
    batch = dataclasses.replace(make_batch([1], [])[0], block_tables=tables)
    places = integers(list(range(len(rows))), torch.int32)
    for processors, tile in ((1, 32), (20, 32), (132, 64)) if QUICK else ((1, 32), (20, 32), (132, 64), (132, 2048)):
        slots = torch.empty(len(rows), most, dtype=torch.int32, device=DEVICE)
        counts = torch.zeros(len(rows), index_rows.DIGITS, index_rows.VALUES, dtype=torch.int32, device=DEVICE)
        given = scores.to(DEVICE), integers(seen, torch.int32), places, counts
        with patch.object(index_choice, "TILE", tile), poisoned_outputs(), programs_backwards():
            index_choice.choose_best(*given, batch, block, slots, processors)
        if MODE == "compile":
            continue
        for i, row in enumerate(rows):
            best = sorted(sorted(range(len(row)), key=lambda n: (-row[n], n))[:most])
            wanted = [int(tables[i, n // block]) * block + n % block for n in best]
            assert slots[i, : len(best)].tolist() == wanted, (processors, tile, i)


def test_keys_are_normalized_rotated_and_stored() -> None:
    for dim, rotary in ((12, 8), (16, 16)) if QUICK else ((12, 8), (16, 16), (128, 64)):
        for dtype in (torch.float32, BF16):
            for interleaved in (False, True):
                layout = IndexLayout(4, dim, rotary, 8, interleaved)
                batch, blocks = make_batch([5, 1], [(3, 20)])
                norm = IndexNorm(rand(dim, dtype=dtype), rand(dim, dtype=dtype), 1e-6)
                # As a part of a product's result: rows lie apart.
                keys = rand(5, dim + 4, dtype=dtype)[:, :dim]
                cache, table = rand(blocks * BLOCK, dim, dtype=dtype), positions_table(rotary, 30)
                theirs = cache.clone()
                with checked_addresses(index_rows):
                    ops.store_index_keys(keys, norm, layout, table, batch, cache)
                ReferenceOps().store_index_keys(keys, norm, layout, table, batch, theirs)
                check(f"keys {dim} {dtype} {interleaved}", cache, theirs)


def test_queries_are_rotated_as_keys_are() -> None:
    """Scores of numbers as they come, also in bfloat16; which tokens are chosen may then differ at the cut."""
    for heads, dim, rotary in ((4, 16, 8),) if QUICK else ((4, 16, 8), (64, 128, 64)):
        for interleaved in (False, True):
            layout = IndexLayout(heads, dim, rotary, 8, interleaved)
            batch, blocks = make_batch([50, 3], [(4, 45)])
            batch, tokens = with_longest(batch), len(batch.positions)
            cache, table = rand(blocks * BLOCK, dim), positions_table(rotary, 60)
            queries, weights = rand(tokens, heads * dim), rand(tokens, heads)
            got = ops.choose_tokens(queries, weights, layout, table, batch, cache, BLOCK)
            if MODE == "compile":
                continue
            want = ReferenceOps().choose_tokens(queries, weights, layout, table, batch, cache, BLOCK)
            for t, (mine, theirs) in enumerate(zip(lists_of(got, tokens), reference_lists(want, batch), strict=True)):
                assert (mine is None) == (theirs is None), t
                if mine is not None and theirs is not None:
                    assert len(mine) == len(theirs) and len(set(mine) ^ set(theirs)) <= 2, (interleaved, t)


def attention_case(
    layout: LatentLayout, index: IndexLayout, batch: AttentionBatch, blocks: int, kind: torch.dtype, dtype: torch.dtype
) -> tuple[tuple[Any, ...], Tensor, Tensor | None, tuple[Any, ...]]:
    cache, scales = make_cache(layout, blocks, kind)
    if cache.dtype in (torch.float32, BF16):
        forget_the_rest(cache.view(-1, layout.cached), batch)
    tokens = len(batch.positions)
    q = rand(tokens, layout.heads * layout.query + layout.cached, dtype=dtype)
    up = rand(layout.heads, layout.plain + layout.value, layout.latent, dtype=dtype, scale=0.1)
    weights = LatentWeights(rand(layout.latent, dtype=dtype), 1e-6, up)
    given = (
        q[:, : -layout.cached],
        q[:, -layout.cached :],
        layout,
        weights,
        positions_table(layout.rotary, 3001),
        batch,
    )
    keys = whole((blocks * BLOCK, index.dim), 2, dtype)
    asked = whole((tokens, index.heads * index.dim), 1, dtype), whole((tokens, index.heads), 1)
    return given, cache, scales, (*asked, index, no_rotation(index.rotary, 3001), batch, keys, BLOCK)


def test_attention_to_what_is_chosen_equals_the_reference() -> None:
    """Decodes and prompts, contexts around what may be chosen and far beyond, all kinds of caches, both families."""
    shapes = [((4, 32, 16, 8, 20), 8)]
    if not QUICK:
        shapes += [((16, 512, 128, 64, 128), 64), ((128, 512, 128, 64, 128), 64), ((10, 96, 24, 12, 40), 40)]
    for number, (shape, most) in enumerate(shapes):
        cases = [([9, 8, 40], []), ([3, 33] * 5, [(7, 7), (5, 30), (12, 12)]), ([], [(20, 60)])]
        if not QUICK:
            cases += [([3000, 17, 900], []), ([100], [(90, 700), (1, 65), (64, 64)])]
        for case, (decodes, prompts) in enumerate(cases):
            kinds = (torch.float32, BF16, INT8, FP8)
            for kind in kinds if not QUICK else (kinds[case],) if case != 1 else (torch.float32, INT8, FP8):
                if kind == torch.float32 and shape[0] == 128:
                    continue
                layout = make_layout(*shape, interleaved=number % 2 == 0)
                dtype = BF16 if kind == BF16 or (not QUICK and kind != torch.float32) else torch.float32
                index = IndexLayout(4, 16, 8, most, False)
                batch, blocks = make_batch(decodes, prompts)
                given, cache, scales, asked = attention_case(layout, index, with_longest(batch), blocks, kind, dtype)
                theirs, their_scales = cache.clone(), None if scales is None else scales.clone()
                with poisoned_outputs(), checked_addresses(*INDEX_MODULES, *LATENT_MODULES):
                    chosen = ops.choose_tokens(*asked)
                    got = ops.attend_chosen(*given, cache, scales, None, chosen)
                if MODE == "compile":
                    continue
                plain = ReferenceOps()
                want = plain.attend_chosen(*given, theirs, their_scales, None, plain.choose_tokens(*asked))
                name = f"{shape} {kind} decodes {decodes}, prompts {prompts}"
                limit = 4e-2 if QUICK and kind == FP8 else 2e-2  # the interpreter cuts where a device rounds
                check(f"cache {name}", cache.float().nan_to_num(), theirs.float().nan_to_num(), limit)
                check(name, got, want, 1e-4 if kind == torch.float32 else limit)


class Additions:
    """Something at every place where adapters add something."""

    def scale(self, plain: Tensor) -> None:
        plain.mul_(2)

    def queries(self, plain: Tensor, made: Tensor) -> None:
        made.add_(plain.mean(-1, keepdim=True))

    def turn(self, seen: Tensor) -> None:
        seen.neg_()

    def values(self, seen: Tensor, made: Tensor) -> None:
        made.add_(seen.mean(-1, keepdim=True))


def test_additions_apply_to_sequences_of_any_length() -> None:
    layout, index = make_layout(4, 32, 16, 8, 20, True), IndexLayout(4, 16, 8, 8, False)
    batch, blocks = make_batch([40, 5], [(2, 6), (2, 20)])
    given, cache, _, asked = attention_case(layout, index, with_longest(batch), blocks, torch.float32, torch.float32)
    q, *rest = given
    with poisoned_outputs():
        chosen = ops.choose_tokens(*asked, every=True)
        got = ops.attend_chosen(q.clone(), *rest, cache.clone(), None, Additions(), chosen)
    if MODE == "compile":
        return
    plain = ReferenceOps()
    found = plain.choose_tokens(*asked, every=True)
    check("with additions", got, plain.attend_chosen(q.clone(), *rest, cache, None, Additions(), found), 1e-4)


def test_the_same_bits_whatever_else_is_in_the_step() -> None:
    """Deterministic mode, in which every token decodes: alone, in halves, beside longer ones or without any."""
    fixed = TritonOps(DEVICE)
    fixed.batch_invariant = True
    layout, index = make_layout(4, 32, 16, 8, 20, True), IndexLayout(4, 16, 8, 8, False)
    for dtype in (torch.float32,) if QUICK else (torch.float32, BF16):
        batch, blocks = make_batch([40, 7, 9, 8, 300], [])
        batch = with_longest(batch)
        given, cache, scales, asked = attention_case(layout, index, batch, blocks, dtype, dtype)
        if MODE == "compile":
            fixed.attend_chosen(*given, cache, scales, None, fixed.choose_tokens(*asked))
            continue
        with poisoned_outputs():
            every = fixed.attend_chosen(*given, cache, scales, None, fixed.choose_tokens(*asked))
        for first, last in ((0, 1), (1, 2), (1, 4), (2, 5)):
            some = slice(first, last)
            few = dataclasses.replace(
                batch, positions=batch.positions[some], slots=batch.slots[some], rows=batch.rows[some],
                context_lens=batch.context_lens[some], num_decodes=last - first,
                query_starts=batch.query_starts[: last - first + 1], longest=int(batch.context_lens[some].max()),
            )  # fmt: skip
            queries, weights, *rest = asked
            rest[2] = few
            chosen = fixed.choose_tokens(queries[some], weights[some], *rest)
            q, kv, *others, _ = given
            if chosen is None:
                part = fixed.latent_attention(q[some], kv[some], *others, few, cache, scales)
            else:
                part = fixed.attend_chosen(q[some], kv[some], *others, few, cache, scales, None, chosen)
            assert torch.equal(part, every[some]), (dtype, first, last)


def test_a_step_as_it_is_captured() -> None:
    """Launches follow from the bound of contexts, not from those in the step: the same numbers with a larger one, with
    padding, and where no context is long."""
    layout, index = make_layout(4, 32, 16, 8, 20, True), IndexLayout(4, 16, 8, 8, False)
    for decodes in ([40, 5, 1, 1], [3, 8, 1, 1]):
        batch, blocks = make_batch(decodes, [])
        given, cache, scales, asked = attention_case(layout, index, batch, blocks, torch.float32, torch.float32)
        captured = dataclasses.replace(batch, longest=4096, max_context=4096)
        (*before, _), asked = given, list(asked)
        asked[4] = captured
        with poisoned_outputs(), checked_addresses(*INDEX_MODULES, *LATENT_MODULES):
            chosen = ops.choose_tokens(*asked)
            got = ops.attend_chosen(*before, captured, cache.clone(), scales, None, chosen)
        if MODE == "compile":
            return
        plain = ReferenceOps()
        asked[4] = batch
        found = plain.choose_tokens(*asked)
        if found:
            want = plain.attend_chosen(*given, cache, scales, None, found)
        else:
            want = plain.latent_attention(*given, cache, scales)
        check(f"captured {decodes}", got, want, 1e-4)


def index_calls(
    decodes: list[int], prompts: list[tuple[int, int]], copies: int
) -> list[tuple[tuple[Any, ...], AttentionBatch, int]]:
    """What `choose_tokens` takes, in DeepSeek V3.2's sizes, over several caches."""
    layout = IndexLayout(64, 128, 64, 2048, False)
    made = []
    for _ in range(copies):
        batch, blocks = make_batch(decodes, prompts)
        batch, tokens = with_longest(batch), len(batch.positions)
        keys, table = rand(blocks * BLOCK, 128, dtype=BF16), positions_table(64, batch.longest or 1)
        asked = rand(tokens, 64 * 128, dtype=BF16), rand(tokens, 64)
        made.append(((*asked, layout, table, batch, keys, BLOCK), batch, blocks))
    return made


def eager_us(call: Callable[[], object]) -> float:
    """Microseconds of a call that waits for the device, the first one apart."""
    if MODE == "compile":
        return 0.0
    call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1000


def bench_choosing_tokens() -> Iterator[Row]:
    """Scores and choice of one layer, beside plain PyTorch: index keys read per second (256 bytes each), or operations
    of the scores. Of a prompt 512 tokens at the end of the context, a sixteenth of a chunk of 8,192."""
    for sequences, context in ((1, 32768), (1, 131072), (16, 32768), (16, 131072)):
        made = index_calls([context] * sequences, [], 4 if sequences == 1 else 1)
        us = time_us([partial(ops.choose_tokens, *asked) for asked, _, _ in made])
        yield bandwidth(f"choosing of {sequences} x {context}", us, sequences * context * 256)
        plain = eager_us(partial(ReferenceOps().choose_tokens, *made[0][0]))
        yield bandwidth(f"choosing of {sequences} x {context}, PyTorch", plain, sequences * context * 256)
    for context in (32768, 131072):
        made = index_calls([], [(512, context)], 1)
        us = time_us([partial(ops.choose_tokens, *asked) for asked, _, _ in made])
        yield arithmetic(f"choosing for 512 of {context}", us, 512 * context * 64 * 128 * 2)
        plain = eager_us(partial(ReferenceOps().choose_tokens, *made[0][0]))
        yield arithmetic(f"choosing for 512 of {context}, PyTorch", plain, 512 * context * 64 * 128 * 2)


def bench_parts_of_choosing() -> Iterator[Row]:
    """Scores and choice each by itself: the scores' bytes or operations, and six readings of a row of scores."""
    layout = IndexLayout(64, 128, 64, 2048, False)
    loads = [([context] * n, []) for n in (1, 16) for context in (32768, 131072)]
    for decodes, prompts in (*loads, ([], [(512, 32768)]), ([], [(64, 131072)])):
        ((queries, weights, *_, table, batch, keys, _), _, _), *_ = index_calls(decodes, prompts, 1)
        tokens, context = len(queries), batch.longest
        width = -(-context // index_choice.TILE) * index_choice.TILE
        seen, scores = torch.empty(tokens, dtype=torch.int32, device=DEVICE), rand(tokens, width)
        slots = torch.empty(tokens, 2048, dtype=torch.int32, device=DEVICE)
        turned, rows, counts = index_rows.ask(queries, layout, table, batch, 0, seen)
        given = turned, weights, seen, rows, layout, batch, keys, BLOCK, scores
        name = f"{len(decodes)} x {context}" if decodes else f"{tokens} of {context}"
        if decodes:
            us = time_us([partial(index_scores.score_tokens, *given, ops.processors)])
            yield bandwidth(f"index scores {name}", us, tokens * context * 256)
        else:
            us = time_us([partial(index_scores.score_tiles, *given, 0, index_scores.choose_tile(2))])
            yield arithmetic(f"index scores {name}", us, tokens * context * 64 * 128 * 2)

        def choose(
            given: tuple[Any, ...] = (scores, seen, rows, counts, batch, BLOCK, slots, ops.processors),
        ) -> None:
            given[3].zero_()
            index_choice.choose_best(*given)

        yield bandwidth(f"choice {name}", time_us([choose]), tokens * context * 24)


def bench_attention_to_chosen() -> Iterator[Row]:
    """One layer of V3.2, all heads and a share of eight, to 2,048 chosen tokens, beside plain PyTorch. Decodes with the
    bytes of the latents, prompts with the operations."""
    index = IndexLayout(64, 128, 64, 2048, False)
    loads = [([context] * n, []) for n in (1, 16) for context in (32768, 131072)]
    for heads in (16, 128):
        layout = make_layout(heads, 512, 128, 64, 128, True)
        for decodes, prompts in (*loads, ([], [(512, 32768)])):
            batch, blocks = make_batch(decodes, prompts)
            batch, tokens = with_longest(batch), len(batch.positions)
            cache, _ = make_cache(layout, blocks, BF16)
            q, kv = rand(tokens, heads * 192, dtype=BF16), rand(tokens, 576, dtype=BF16)
            weights = LatentWeights(rand(512, dtype=BF16), 1e-6, rand(heads, 256, 512, dtype=BF16, scale=0.1))
            table = positions_table(64, batch.longest or 1)
            asked = rand(tokens, 64 * 128, dtype=BF16), rand(tokens, 64)
            keys = rand(blocks * BLOCK, 128, dtype=BF16)
            given = q, kv, layout, weights, table, batch, cache, None, None
            chosen = ops.choose_tokens(*asked, index, table, batch, keys, BLOCK)
            us = time_us([partial(ops.attend_chosen, *given, chosen)])
            name = f"chosen, {heads} heads, " + (f"{tokens} x {batch.longest}" if decodes else f"{tokens} of a prompt")
            rate = bandwidth if decodes else arithmetic
            work = tokens * 2048 * (576 * 2 if decodes else heads * (576 + 512) * 2)
            yield rate(name, us, work)
            plain = ReferenceOps()
            found = plain.choose_tokens(*asked, index, table, batch, keys, BLOCK) if MODE == "device" else ()
            yield rate(f"{name}, PyTorch", eager_us(partial(plain.attend_chosen, *given, found)), work)


def tune_index_scores_of_prompts() -> Iterator[Row]:
    layout = IndexLayout(64, 128, 64, 2048, False)
    ((queries, weights, *_, table, batch, keys, _), _, _), *_ = index_calls([], [(256, 32768)], 1)
    seen, scores = torch.empty(256, dtype=torch.int32, device=DEVICE), rand(256, 32768)
    turned, rows, _ = index_rows.ask(queries, layout, table, batch, 0, seen)
    given = turned, weights, seen, rows, layout, batch, keys, BLOCK, scores, 0
    for tokens, width, warps in ((64, 128, 4), (64, 256, 8), (128, 128, 8), (128, 64, 4)):
        for stages in (2, 3, 4):
            tile = index_scores.TileConfig(tokens, width, warps, stages)
            us = time_us([partial(index_scores.score_tiles, *given, tile)], repeats=5)
            yield arithmetic(f"tune index scores {tokens}x{width} w{warps} s{stages}", us, 256 * 32768 * 64 * 256)
