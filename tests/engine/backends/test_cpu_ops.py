"""The native operations agree with the reference, for every dtype, thread count and instruction set built here."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from penstock.engine.backends import cpu
from penstock.engine.backends.cpu.layout import LayoutError
from penstock.engine.backends.cpu.ops import CpuOps
from penstock.engine.backends.interface import AttentionBatch, Clip, HeadLayout, Xielu
from penstock.engine.backends.reference.ops import ReferenceOps

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""A few units in the last place: the two sides round at different moments."""


@pytest.fixture(
    scope="module",
    params=[("native", 1), ("native", 2), pytest.param(("generic", 2), marks=pytest.mark.slow)],
    ids=lambda p: f"{p[0]}-{p[1]}",
)
def ops(request: pytest.FixtureRequest) -> CpuOps:
    isa, threads = request.param
    if not cpu.status(isa).available:
        pytest.skip(cpu.status(isa).detail)
    loaded = cpu.load(threads, isa)
    assert loaded is not None
    return loaded


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_gate_match_the_reference(ops: CpuOps, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    reference = ReferenceOps()
    for rows, width in ((1, 8), (3, 50), (1, 576), (70, 576), (129, 1000)):
        for weight_dtype in (dtype, torch.float32):
            x = torch.randn(rows, width).to(dtype)
            weight = torch.randn(width).to(weight_dtype)
            close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), dtype)
            ours, theirs = torch.randn(rows, width).to(dtype), None
            theirs = ours.clone()
            actual = ops.add_rms_norm(x.clone(), ours, weight, 1e-5)
            expected = reference.add_rms_norm(x, theirs, weight, 1e-5)
            assert torch.equal(ours, theirs), "the residual is the exact rounded sum"
            close(actual, expected, dtype)
            x_weight = torch.randn(width).to(weight_dtype)
            actual = ops.add_rms_norm(x.clone(), ours, weight, 1e-5, x_weight)
            expected = reference.add_rms_norm(x.float(), (wide := theirs.float()), weight, 1e-5, x_weight)
            close(ours, wide, dtype)
            close(actual, expected, dtype)
        gate_up = 4 * torch.randn(rows, 2 * width).to(dtype)
        wide = gate_up.float()
        close(ops.silu_mul(gate_up), reference.silu_mul(wide).to(dtype), dtype)
        close(ops.gelu_mul(gate_up), reference.gelu_mul(wide).to(dtype), dtype)
        close(ops.bounded_silu(gate_up, 1.5), reference.bounded_silu(wide, 1.5).to(dtype), dtype)
        gate = torch.randn(rows, width)
        for heads in (1, width // 2, width):  # gates of whole heads, and of each number
            expected = reference.sigmoid_mul(wide[:, :width], gate[:, :heads]).to(dtype)
            close(ops.sigmoid_mul(gate_up[:, :width].contiguous(), gate[:, :heads].to(dtype)), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_by_themselves_and_rows_added_to_rows(ops: CpuOps, dtype: torch.dtype) -> None:
    """Also far from zero, where exponentials overflow."""
    torch.manual_seed(0)
    reference = ReferenceOps()
    for rows, width in ((1, 8), (3, 50), (70, 576)):
        x = (torch.randn(rows, width) * torch.tensor([0.001, 1.0, 40.0])[torch.arange(width) % 3]).to(dtype)
        for function in ("relu2", "plain_gelu", "plain_gelu_tanh", Clip(0.7), Xielu(0.9, 1.4, 0.4, -1e-3)):
            close(ops.pointwise(x.clone(), function), reference.pointwise(x.float(), function).to(dtype), dtype)
        for row_dtype in (dtype, torch.float32):
            row, ours = torch.randn(width).to(row_dtype), x.clone()
            ops.add_row(ours, row)
            close(ours, (x.float() + row.float()).to(dtype), dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_stream_in_float32_beside_narrow_activations(ops: CpuOps, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    reference = ReferenceOps()
    for rows, width in ((1, 8), (3, 50), (70, 576)):
        x, weight, x_weight = torch.randn(rows, width).to(dtype), torch.randn(width), torch.randn(width)
        ours = ops.widen(x)
        assert ours.dtype is torch.float32 and torch.equal(ours, x.float())
        theirs = ours.clone()
        normed = ops.rms_norm(ours, weight, 1e-5, dtype)
        assert normed.dtype is dtype
        close(normed, reference.rms_norm(theirs, weight, 1e-5, dtype), dtype)
        for _ in range(3):  # what is added is less than a step of `dtype` at this size, and must not get lost
            actual = ops.add_rms_norm(x / 4096, ours, weight, 1e-5)
            expected = reference.add_rms_norm(x / 4096, theirs, weight, 1e-5)
            assert torch.equal(ours, theirs) and not torch.equal(ours, x.float())
            assert actual.dtype is dtype
            close(actual, expected, dtype)
        ops.add_rms_norm(x, ours, weight, 1e-5, x_weight)
        reference.add_rms_norm(x.float(), theirs, weight, 1e-5, x_weight)
        close(ours, theirs, torch.float32)
    with pytest.raises(LayoutError, match="does not go with"):
        ops.add_rms_norm(torch.zeros(2, 8), torch.zeros(2, 8, dtype=dtype), torch.ones(8), 1e-5)


def test_gate_survives_extreme_values(ops: CpuOps) -> None:
    gate = torch.tensor([[-1e4, -200.0, -88.5, 0.0, 88.5, 200.0, 1e4, 1.0]])
    out = ops.silu_mul(torch.cat((gate, torch.ones_like(gate)), dim=1))
    torch.testing.assert_close(out, torch.nn.functional.silu(gate), rtol=1e-6, atol=1e-30)
    out = ops.gelu_mul(torch.cat((gate, torch.ones_like(gate)), dim=1))
    torch.testing.assert_close(out, torch.nn.functional.gelu(gate, approximate="tanh"), rtol=1e-6, atol=1e-30)


def make_batch(
    lengths: list[tuple[int, int]], block_size: int, seed: int, spare_blocks: int = 5
) -> tuple[AttentionBatch, int]:
    """A batch of sequences given as (context, new tokens), decodes first; blocks are handed out at random."""
    lengths = sorted(lengths, key=lambda pair: pair[1] > 1)
    rng = random.Random(seed)
    needed = [-(-context // block_size) for context, _ in lengths]
    num_blocks = 1 + sum(needed) + spare_blocks
    free = rng.sample(range(1, num_blocks), sum(needed))
    rows = rng.sample(range(len(lengths) + 3), len(lengths))
    tables = torch.full((len(lengths) + 3, max(needed) + 2), 10_000, dtype=torch.int32)
    positions, slots, starts = [], [], [0]
    for row, need, (context, fresh) in zip(rows, needed, lengths, strict=True):
        blocks = [free.pop() for _ in range(need)]
        tables[row, :need] = torch.tensor(blocks, dtype=torch.int32)
        for position in range(context - fresh, context):
            positions.append(position)
            slots.append(blocks[position // block_size] * block_size + position % block_size)
        starts.append(starts[-1] + fresh)
    batch = AttentionBatch(
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor([context for context, _ in lengths], dtype=torch.int32),
        rows=torch.tensor(rows, dtype=torch.int32),
        block_tables=tables,
        num_decodes=sum(fresh == 1 for _, fresh in lengths),
        max_query=max(fresh for _, fresh in lengths),
        max_context=max(context for context, _ in lengths),
    )
    return batch, num_blocks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", [False, True])
def test_rope_and_cache_matches_the_reference(ops: CpuOps, dtype: torch.dtype, norms: bool) -> None:
    torch.manual_seed(1)
    reference = ReferenceOps()
    for cache_dtype in DTYPES:
        for heads, kv_heads, dim, rotary in ((9, 3, 64, 64), (4, 4, 20, 20), (4, 2, 48, 36), (2, 1, 8, 8)):
            layout = HeadLayout(heads, kv_heads, dim, dim**-0.5)
            batch, num_blocks = make_batch([(40, 1), (7, 7), (130, 61)], 16, seed=dim)
            tokens = batch.positions.shape[0]
            qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
            angles = torch.rand(256, rotary // 2) * 6
            cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
            weights = [torch.rand(dim).to(dtype) + 0.5 if norms else None for _ in range(2)]
            caches = [torch.full((num_blocks, kv_heads, 16, dim), 7.0, dtype=cache_dtype) for _ in range(4)]
            expected = reference.rope_and_cache(qkv.clone(), layout, cos_sin, batch, *caches[:2], *weights, 1e-6)
            actual = ops.rope_and_cache(qkv, layout, cos_sin, batch, *caches[2:], *weights, 1e-6)
            close(actual, expected, dtype)
            coarser = max((dtype, cache_dtype), key=lambda kind: TOLERANCE[kind])
            close(caches[2], caches[0], coarser)
            assert torch.equal(caches[3], caches[1]), "values are stored as they are, and nothing else is touched"


def exact_attention(
    q: Tensor, layout: HeadLayout, batch: AttentionBatch, k_cache: Tensor, v_cache: Tensor, sinks: Tensor | None = None
) -> Tensor:
    """Float64, one query at a time, straight from the definition."""
    block_size, group = k_cache.shape[2], layout.heads // layout.kv_heads
    out = torch.empty(q.shape, dtype=torch.float64)
    starts = batch.query_starts.tolist()
    for i, context in enumerate(batch.context_lens.tolist()):
        table = batch.block_tables[batch.rows[i]][: -(-context // block_size)].long()
        k, v = (
            cache[table].double().transpose(1, 2).reshape(-1, layout.kv_heads, layout.head_dim)
            for cache in (k_cache, v_cache)
        )
        for token in range(starts[i], starts[i + 1]):
            last = context - (starts[i + 1] - token)
            first = 0 if layout.window is None else max(0, last - layout.window + 1)
            for head in range(layout.heads):
                keys, values = k[first : last + 1, head // group], v[first : last + 1, head // group]
                scores = keys @ q[token, head].double() * layout.scale
                if layout.softcap is not None:
                    scores = layout.softcap * torch.tanh(scores / layout.softcap)
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head : head + 1].double()))
                out[token, head] = torch.softmax(scores, dim=0)[: len(values)] @ values
    return out.view(q.shape[0], -1)


CASES = [
    # heads, kv heads, head dim, block size, window, [(context, new tokens)]
    (9, 3, 64, 16, None, [(1, 1), (17, 1), (128, 1), (129, 1), (300, 1)]),
    (9, 3, 64, 16, None, [(33, 33), (100, 40), (64, 64), (5, 2), (200, 1)]),
    (8, 1, 80, 8, None, [(150, 1), (31, 9)]),
    (4, 4, 20, 4, None, [(70, 1), (13, 13)]),
    (2, 1, 8, 16, 5, [(3, 1), (40, 1), (30, 30)]),
    (6, 2, 128, 32, 70, [(300, 1), (257, 1), (190, 100)]),
    (7, 7, 16, 16, None, [(20, 20)]),
    (8, 1, 96, 8, None, [(150, 1), (77, 77)]),
    (16, 1, 32, 16, 20, [(40, 1), (50, 23)]),
    (14, 2, 64, 16, 90, [(150, 1), (40, 1), (128, 1)]),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_matches_float64(ops: CpuOps, dtype: torch.dtype, case: tuple) -> None:  # type: ignore[type-arg]
    heads, kv_heads, dim, block_size, window, lengths = case
    torch.manual_seed(dim)
    layout = HeadLayout(heads, kv_heads, dim, dim**-0.5, window)
    batch, num_blocks = make_batch(lengths, block_size, seed=dim)
    for cache_dtype in {dtype, torch.float16}:
        q = (2 * torch.randn(batch.positions.shape[0], heads, dim)).to(dtype)
        shape = (num_blocks, kv_heads, block_size, dim)
        k_cache, v_cache = (torch.randn(shape).to(cache_dtype) for _ in range(2))
        for unowned in set(range(num_blocks)) - set(batch.block_tables.flatten().tolist()):
            k_cache[unowned] = v_cache[unowned] = float("nan")
        actual = ops.attention(q, layout, batch, k_cache, v_cache)
        close(actual, exact_attention(q, layout, batch, k_cache, v_cache), dtype)


@pytest.mark.parametrize("window", [None, 37])
def test_soft_caps_match_float64(ops: CpuOps, window: int | None) -> None:
    torch.manual_seed(11)
    layout = HeadLayout(4, 2, 24, 0.5, window, softcap=3.0)
    batch, num_blocks = make_batch([(1, 1), (200, 1), (33, 33), (90, 20)], 16, seed=11)
    q = 3 * torch.randn(batch.positions.shape[0], 4, 24)
    k_cache, v_cache = (torch.randn(num_blocks, 2, 16, 24) for _ in range(2))
    exact = exact_attention(q, layout, batch, k_cache, v_cache)
    close(ops.attention(q, layout, batch, k_cache, v_cache), exact, torch.float32)
    batch.block_tables.clamp_(max=num_blocks - 1)  # the reference reads, and masks, what lies behind a context
    close(ReferenceOps().attention(q, layout, batch, k_cache, v_cache), exact, torch.float32)


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks_match_float64(ops: CpuOps, dtype: torch.dtype, window: int | None) -> None:
    """In decodes of one part and of several, and in prompts; sinks far above and far below the scores."""
    torch.manual_seed(13)
    layout = HeadLayout(8, 2, 64, 0.125, window)
    batch, num_blocks = make_batch([(1, 1), (200, 1), (700, 1), (33, 33), (90, 20)], 16, seed=13)
    q = (3 * torch.randn(batch.positions.shape[0], 8, 64)).to(dtype)
    k_cache, v_cache = (torch.randn(num_blocks, 2, 16, 64).to(dtype) for _ in range(2))
    sinks = torch.tensor([-50.0, -3.0, 0.0, 1.0, 2.5, 4.0, 9.0, 40.0])
    exact = exact_attention(q, layout, batch, k_cache, v_cache, sinks)
    close(ops.attention(q, layout, batch, k_cache, v_cache, None, sinks), exact, dtype)
    batch.block_tables.clamp_(max=num_blocks - 1)
    close(ReferenceOps().attention(q, layout, batch, k_cache, v_cache, None, sinks), exact, dtype)


def test_a_decode_over_131072_keys(ops: CpuOps) -> None:
    torch.manual_seed(12)
    layout, context = HeadLayout(4, 1, 16, 0.25), 131_072
    batch, num_blocks = make_batch([(context, 1)], 16, seed=12)
    q = 3 * torch.randn(1, 4, 16)
    k_cache, v_cache = (torch.randn(num_blocks, 1, 16, 16) for _ in range(2))
    close(ops.attention(q, layout, batch, k_cache, v_cache), exact_attention(q, layout, batch, k_cache, v_cache),
          torch.float32)  # fmt: skip


def test_attention_reads_queries_inside_qkv_and_interleaved_caches(ops: CpuOps) -> None:
    torch.manual_seed(3)
    layout = HeadLayout(4, 2, 32, 32**-0.5)
    batch, num_blocks = make_batch([(50, 1), (30, 12)], 16, seed=3)
    fused = torch.randn(batch.positions.shape[0], 8 * 32)
    q = fused[:, : 4 * 32].view(-1, 4, 32)
    both = torch.randn(num_blocks, 2, 2, 16, 32)  # keys and values side by side in one tensor
    actual = ops.attention(q, layout, batch, both[:, 0], both[:, 1])
    close(actual, exact_attention(q, layout, batch, both[:, 0], both[:, 1]), torch.float32)


def test_attention_is_batch_invariant() -> None:
    layout = HeadLayout(9, 3, 64, 0.125)
    results = []
    for threads, others_in_batch in ((1, []), (2, [(77, 1), (500, 1)]), (3, [(64, 20), (9, 1)])):
        ops = cpu.load(threads)
        if ops is None:
            pytest.skip(cpu.status().detail)
        ops.batch_invariant = True
        batch, num_blocks = make_batch([(400, 1), *others_in_batch], 16, seed=threads)
        index = batch.context_lens.tolist().index(400)
        generator = torch.Generator().manual_seed(5)
        keys, values = (torch.randn(25, 3, 16, 64, generator=generator) for _ in range(2))
        q = torch.randn(batch.positions.shape[0], 9, 64)
        q[index] = torch.randn(9, 64, generator=generator)
        k_cache, v_cache = torch.randn(num_blocks, 3, 16, 64), torch.randn(num_blocks, 3, 16, 64)
        mine = batch.block_tables[batch.rows[index]][:25].long()
        k_cache[mine], v_cache[mine] = keys, values
        results.append(ops.attention(q, layout, batch, k_cache, v_cache)[index])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_greedy_choice_is_the_first_largest(ops: CpuOps) -> None:
    torch.manual_seed(4)
    for rows, width in ((1, 1), (5, 7), (3, 49152), (64, 1030)):
        logits = torch.randn(rows, width)
        logits[:, width // 2] = logits[:, -1] = logits.max() + 1
        assert ops.argmax(logits).tolist() == [width // 2] * rows
        close(ops.logsumexp(logits), torch.logsumexp(logits.double(), dim=1), torch.float32)
    assert ops.argmax(torch.full((2, 9), float("-inf"))).tolist() == [0, 0]


def gumbel_noise(keys: list[int], width: int) -> Tensor:
    """The noise as elementwise/gumbel.h defines it, in Python integers and float64."""
    mask, rows = (1 << 64) - 1, []
    for key in keys:
        row = []
        for i in range(width):
            z = (key + i * 0x9E3779B97F4A7C15) & mask
            z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
            row.append((((z ^ (z >> 31)) >> 40) | 1) / 2**24)
        rows.append(row)
    return -torch.log(-torch.log(torch.tensor(rows, dtype=torch.float64)))


def test_gumbel_choice_is_the_argmax_of_the_defined_noise(ops: CpuOps) -> None:
    rng = random.Random(6)
    torch.manual_seed(6)
    keys = [rng.getrandbits(64) for _ in range(40)]
    logits = torch.randn(40, 517) * torch.linspace(0, 8, 40)[:, None]
    temperatures = torch.linspace(0.2, 3, 40)
    expected = (logits.double() / temperatures.double()[:, None] + gumbel_noise(keys, 517)).argmax(dim=1)
    signed = torch.tensor([key - (1 << 64) if key >> 63 else key for key in keys])
    assert torch.equal(ops.gumbel_argmax(logits, temperatures, signed), expected)
    assert torch.equal(ops.gumbel_argmax(logits, torch.zeros(40), signed), logits.argmax(dim=1))


def test_gumbel_draws_follow_the_softmax(ops: CpuOps) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, float("-inf")])
    draws = 40_000
    generator = torch.Generator().manual_seed(8)
    keys = torch.randint(-(2**63), 2**63 - 1, (draws,), generator=generator)
    picked = ops.gumbel_argmax(logits.repeat(draws, 1), torch.full((draws,), 0.8), keys)
    share = torch.bincount(picked, minlength=5) / draws
    assert (share - torch.softmax(logits / 0.8, dim=0)).abs().max() < 0.01
    assert share[4] == 0


def test_wrong_layouts_are_refused_with_a_reason(ops: CpuOps) -> None:
    with pytest.raises(LayoutError, match="contiguous"):
        ops.rms_norm(torch.randn(8, 4).t(), torch.ones(8), 1e-5)
    with pytest.raises(LayoutError, match="float64"):
        ops.silu_mul(torch.randn(2, 8, dtype=torch.float64))
    layout = HeadLayout(2, 1, 8, 1.0)
    batch, num_blocks = make_batch([(20, 1)], 16, seed=0)
    caches = [torch.zeros(num_blocks, 1, 16, 8) for _ in range(2)]
    with pytest.raises(LayoutError, match="rotary table of 16 rows"):
        ops.rope_and_cache(torch.zeros(1, 32), layout, torch.zeros(16, 8), batch, *caches, None, None, 1e-5)
    batch.slots[0] = num_blocks * 16
    with pytest.raises(LayoutError, match="outside the cache"):
        ops.rope_and_cache(torch.zeros(1, 32), layout, torch.zeros(32, 8), batch, *caches, None, None, 1e-5)
