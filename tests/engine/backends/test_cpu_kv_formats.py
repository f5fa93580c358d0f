"""A cache of one byte per number: what is stored, what is read back, on the native kernels and the reference."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.engine.backends import cpu
from penstock.engine.backends.cpu.layout import LayoutError
from penstock.engine.backends.cpu.ops import CpuOps
from penstock.engine.backends.interface import FP8, INT8, SCALE_DTYPE, HeadLayout, KeySmoothing, KVScales, Ops
from penstock.engine.backends.reference.ops import ReferenceOps
from tests.engine.backends.test_cpu_ops import CASES, DTYPES, TOLERANCE, exact_attention, make_batch


@pytest.fixture(scope="module", params=["reference", "native", pytest.param("generic", marks=pytest.mark.slow)])
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "reference":
        return ReferenceOps()
    if not cpu.status(request.param).available:
        pytest.skip(cpu.status(request.param).detail)
    loaded = cpu.load(2, request.param)
    assert loaded is not None
    return loaded


def poisoned(
    num_blocks: int, layout: HeadLayout, block_size: int, kind: torch.dtype
) -> tuple[Tensor, Tensor, KVScales]:
    """A cache whose every slot holds the worst there is."""
    shape = (num_blocks, layout.kv_heads, block_size)
    if kind == INT8:
        caches = [torch.full((*shape, layout.head_dim), -128, dtype=INT8) for _ in range(2)]
        return *caches, (torch.full(shape, float("nan")).to(SCALE_DTYPE), torch.full(shape, torch.inf).to(SCALE_DTYPE))
    caches = [torch.full((*shape, layout.head_dim), 0x7F, dtype=torch.uint8).view(FP8) for _ in range(2)]
    return *caches, (torch.rand(layout.kv_heads) + 0.5, torch.rand(layout.kv_heads) + 0.5)


def widened(cache: Tensor, scales: Tensor) -> Tensor:
    scale = scales if scales.dim() == 3 else scales.unsqueeze(1)
    return cache.double() * scale.double().unsqueeze(-1)


def fill(ops: Ops, layout: HeadLayout, lengths: list[tuple[int, int]], block_size: int, kind: torch.dtype) -> tuple:  # type: ignore[type-arg]
    """Every token of the batch's sequences written through `rope_and_cache` without rotation; what was written."""
    whole, num_blocks = make_batch([(context, context) for context, _ in lengths], block_size, seed=1)
    caches = poisoned(num_blocks, layout, block_size, kind)
    width = (layout.heads + 2 * layout.kv_heads) * layout.head_dim
    qkv = torch.randn(whole.positions.shape[0], width) * torch.rand(whole.positions.shape[0], 1).mul(6).exp() / 50
    still = torch.cat((torch.ones(512, layout.head_dim // 2), torch.zeros(512, layout.head_dim // 2)), dim=1)
    expected = qkv.clone().view(-1, layout.heads + 2 * layout.kv_heads, layout.head_dim)
    ops.rope_and_cache(qkv, layout, still, whole, caches[0], caches[1], None, None, 1e-6, caches[2])
    return whole, caches, expected


@pytest.mark.parametrize("kind", [INT8, FP8], ids=["int8", "fp8"])
def test_what_is_written_comes_back_within_half_a_step(ops: Ops, kind: torch.dtype) -> None:
    torch.manual_seed(0)
    for heads, kv_heads, dim in ((4, 2, 64), (2, 1, 20), (3, 3, 8)):
        layout = HeadLayout(heads, kv_heads, dim, 1.0)
        batch, (k, v, scales), written = fill(ops, layout, [(40, 1), (7, 1), (33, 5)], 16, kind)
        block, offset = batch.slots // 16, batch.slots % 16
        for cache, scale, first in ((k, scales[0], heads), (v, scales[1], heads + kv_heads)):
            got = widened(cache, scale)[block, :, offset]
            want = written[:, first : first + kv_heads].double()
            if kind == INT8:
                step = want.abs().amax(-1, keepdim=True) / 127
                assert ((got - want).abs() <= step * 0.51).all()
            else:
                assert ((got - want).abs() <= want.abs() / 16 + 2.0**-10 * scale.max()).all()


def test_int8_scales_fit_each_token_and_head_and_zeros_stay_zero(ops: Ops) -> None:
    layout = HeadLayout(2, 2, 16, 1.0)
    batch, num_blocks = make_batch([(4, 4)], 16, seed=0)
    k, v, scales = poisoned(num_blocks, layout, 16, INT8)
    qkv = torch.zeros(4, 6 * 16)
    qkv[1, 2 * 16 + 3] = 1e-6
    qkv[2, 3 * 16 + 5] = -3e4
    table = torch.cat((torch.ones(8, 8), torch.zeros(8, 8)), dim=1)
    ops.rope_and_cache(qkv, layout, table, batch, k, v, None, None, 1e-6, scales)
    block, offset = int(batch.slots[0]) // 16, batch.slots % 16
    got = widened(k, scales[0])[block][:, offset]
    assert got[:, 0].abs().max() == 0
    assert float(got[0, 1, 3]) == pytest.approx(1e-6, rel=5e-3)
    assert float(got[1, 2, 5]) == pytest.approx(-3e4, rel=5e-3)
    assert got[0, 2].abs().max() == 0, "a large number in one head costs another head nothing"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [None, INT8], ids=["as computed", "int8"])
def test_smoothing_changes_how_keys_are_stored_and_not_the_attention(
    ops: Ops, dtype: torch.dtype, kind: torch.dtype | None
) -> None:
    torch.manual_seed(3)
    for heads, kv_heads, dim in ((6, 2, 64), (2, 2, 20)):
        layout = HeadLayout(heads, kv_heads, dim, dim**-0.5)
        batch, num_blocks = make_batch([(40, 40), (70, 70)], 16, seed=2)
        width = (heads + 2 * kv_heads) * dim
        qkv = torch.randn(110, width).to(dtype)
        smoothing = KeySmoothing(5 * torch.randn(kv_heads, dim), torch.rand(kv_heads, dim) * 2 + 0.1)
        keys = qkv.view(110, -1, dim)[:, heads : heads + kv_heads]
        keys.copy_(keys.float() * smoothing.scale + smoothing.centre)
        table = torch.cat((torch.ones(128, dim // 4), torch.zeros(128, dim // 4)), dim=1)  # half of a head turns, by 0
        outs, errors = [], []
        for using in (None, smoothing):
            if kind is None:
                k, v = (torch.zeros(num_blocks, kv_heads, 16, dim, dtype=dtype) for _ in range(2))
                scales = None
            else:
                k, v, scales = poisoned(num_blocks, layout, 16, kind)
            q = ops.rope_and_cache(qkv.clone(), layout, table, batch, k, v, None, None, 1e-6, scales, using)
            outs.append(ops.attention(q, layout, batch, k, v, scales).double())
            block, offset = batch.slots // 16, batch.slots % 16
            got = (k.double() if scales is None else widened(k, scales[0]))[block, :, offset]
            if using is not None:
                got = got * using.scale + using.centre
            errors.append((got - keys.double()).abs().mean())
        tolerance = {torch.float32: 1e-4}.get(dtype, 0.1) if kind is None else 0.3
        torch.testing.assert_close(outs[1], outs[0], rtol=tolerance, atol=tolerance)
        if kind is not None:
            assert errors[1] < 0.5 * errors[0]


@functools.cache
def attention_cases(kind: torch.dtype, dtype: torch.dtype) -> list[tuple]:  # type: ignore[type-arg]
    """Layout, batch, query, caches and scales, and what attention gives; made once for all implementations."""
    torch.manual_seed(1)
    made = []
    for heads, kv_heads, dim, block_size, window, lengths in CASES:
        layout = HeadLayout(heads, kv_heads, dim, dim**-0.5, window)
        batch, num_blocks = make_batch(lengths, block_size, seed=dim)
        k, v, scales = poisoned(num_blocks, layout, block_size, kind)
        for i, context in enumerate(batch.context_lens.tolist()):
            at = torch.arange(context)
            block = batch.block_tables[batch.rows[i]][at // block_size].long()
            for cache, scale in ((k, scales[0]), (v, scales[1])):
                numbers = torch.randn(context, kv_heads, dim)
                if kind == INT8:
                    scale[block, :, at % block_size] = (torch.rand(context, kv_heads) / 40).to(SCALE_DTYPE)
                    cache[block, :, at % block_size] = numbers.mul(40).clamp(-127, 127).to(INT8)
                else:
                    raw = cache.view(torch.uint8)
                    raw[block, :, at % block_size] = numbers.to(FP8).view(torch.uint8)
        q = (2 * torch.randn(batch.positions.shape[0], heads, dim)).to(dtype)
        made.append(
            (
                layout,
                batch,
                q,
                k,
                v,
                scales,
                exact_attention(q, layout, batch, widened(k, scales[0]), widened(v, scales[1])),
            )
        )
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [INT8, FP8], ids=["int8", "fp8"])
def test_attention_reads_what_the_cache_holds(ops: Ops, dtype: torch.dtype, kind: torch.dtype) -> None:
    """Exactly the widened cache: the only error allowed is that of the arithmetic, whatever unused slots hold."""
    for layout, batch, q, k, v, scales, expected in attention_cases(kind, dtype):
        actual = ops.attention(q, layout, batch, k, v, scales)
        # The reference multiplies numbers of `dtype`, so that the cache is rounded to it. Native kernels may keep 15
        # bits of a query where they multiply int8 keys as integers.
        tolerance = TOLERANCE[dtype] * (2 if isinstance(ops, ReferenceOps) else 1)
        tolerance = max(tolerance, 2e-4) if kind == INT8 else tolerance
        torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_prompts_with_sinks_and_caps_read_what_the_cache_holds(
    ops: Ops, window: int | None, softcap: float | None
) -> None:
    """Also with values of very different sizes side by side."""
    torch.manual_seed(5)
    layout = HeadLayout(6, 2, 64, 0.125, window, softcap=softcap)
    batch, num_blocks = make_batch([(170, 170), (650, 40), (700, 2)], 16, seed=5)
    k, v, scales = poisoned(num_blocks, layout, 16, INT8)
    for cache, scale, spread in ((k, scales[0], 1.0), (v, scales[1], 5.0)):
        cache.copy_(torch.randn(cache.shape).mul(40).clamp(-127, 127).to(INT8))
        scale.copy_((torch.rand(scale.shape).mul(spread).exp() / 100).to(SCALE_DTYPE))
    q = torch.randn(batch.positions.shape[0], 6, 64)
    sinks = torch.tensor([-20.0, 0.0, 4.0, 1.0, 9.0, -1.0])
    batch.block_tables.clamp_(max=num_blocks - 1)  # the reference reads, and masks, what lies behind a context
    expected = exact_attention(q, layout, batch, widened(k, scales[0]), widened(v, scales[1]), sinks)
    actual = ops.attention(q, layout, batch, k, v, scales, sinks)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-3, atol=2e-4 * float(expected.abs().max()))


def test_a_token_does_not_depend_on_the_others_of_its_step(ops: Ops) -> None:
    """Bit by bit, on the native kernels: what comes behind a token changes nothing of it."""
    if isinstance(ops, ReferenceOps):
        pytest.skip("PyTorch chooses its products by their sizes")
    torch.manual_seed(6)
    layout = HeadLayout(6, 2, 64, 0.125)
    whole, num_blocks = make_batch([(750, 150)], 16, seed=6)
    k, v, scales = poisoned(num_blocks, layout, 16, INT8)
    for cache, scale in ((k, scales[0]), (v, scales[1])):
        cache.copy_(torch.randn(cache.shape).mul(40).clamp(-127, 127).to(INT8))
        scale.copy_((torch.rand(scale.shape) / 20).to(SCALE_DTYPE))
    q = torch.randn(150, 6, 64)
    outs = ops.attention(q, layout, whole, k, v, scales)
    for length in (70, 129):
        part = replace(
            whole,
            positions=whole.positions[:length],
            slots=whole.slots[:length],
            query_starts=torch.tensor([0, length], dtype=torch.int32),
            context_lens=torch.tensor([600 + length], dtype=torch.int32),
            max_query=length,
            max_context=600 + length,
        )
        assert torch.equal(ops.attention(q[:length], layout, part, k, v, scales), outs[:length])


def test_every_fp8_number_is_read_exactly(ops: Ops) -> None:
    layout = HeadLayout(1, 1, 256, 0.0)
    batch, num_blocks = make_batch([(1, 1)], 4, seed=0)
    k, v, scales = poisoned(num_blocks, layout, 4, FP8)
    k.view(torch.uint8).zero_()
    scales[1].fill_(1.0)
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[0x7F, 0xFF]] = 0  # NaN, which is never stored
    block, offset = int(batch.slots[0]) // 4, int(batch.slots[0]) % 4
    v.view(torch.uint8)[block, 0, offset] = codes
    out = ops.attention(torch.zeros(1, 1, 256), layout, batch, k, v, scales)
    torch.testing.assert_close(out[0], codes.view(FP8).float(), rtol=1e-6, atol=0)


def test_every_fp8_rounding_is_that_of_torch(ops: Ops) -> None:
    layout = HeadLayout(1, 1, 64, 1.0)
    batch, num_blocks = make_batch([(400, 400)], 16, seed=0)
    k, v, scales = poisoned(num_blocks, layout, 16, FP8)
    scales[0].fill_(1.0), scales[1].fill_(1.0)
    torch.manual_seed(2)
    numbers = torch.randn(400, 64) * torch.randn(400, 64).mul(4).exp()
    codes = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    numbers.view(-1)[:126] = (codes[1:] + codes[:-1]) / 2  # exactly between two neighbours
    numbers.view(-1)[126:252] = -(codes[1:] + codes[:-1]) / 2
    numbers.view(-1)[252] = 1e9
    qkv = torch.cat((torch.zeros(400, 128), numbers), dim=1)
    ops.rope_and_cache(qkv, layout, torch.zeros(512, 64), batch, k, v, None, None, 1e-6, scales)
    got = v.view(torch.uint8)[batch.slots // 16, 0, batch.slots % 16]
    assert torch.equal(got, numbers.clamp(-448, 448).to(FP8).view(torch.uint8))


def test_scales_that_do_not_belong_are_refused() -> None:
    native = cpu.load(1)
    if not isinstance(native, CpuOps):
        pytest.skip(cpu.status().detail)
    layout = HeadLayout(2, 1, 8, 1.0)
    batch, num_blocks = make_batch([(20, 1)], 16, seed=0)
    k, v, scales = poisoned(num_blocks, layout, 16, INT8)
    q = torch.zeros(1, 2, 8)
    with pytest.raises(LayoutError, match="needs scales"):
        native.attention(q, layout, batch, k, v)
    with pytest.raises(LayoutError, match="has no scales"):
        native.attention(q, layout, batch, k.float(), v.float(), scales)
    with pytest.raises(LayoutError, match="key scales must be"):
        native.attention(q, layout, batch, k, v, (scales[0][:1].contiguous(), scales[1]))
