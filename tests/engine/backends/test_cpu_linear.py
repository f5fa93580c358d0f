"""Quantized linears: exact integers inside, and no error beyond what rounding the activations explains."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends import cpu
from penstock.engine.backends.cpu.layout import LayoutError
from penstock.engine.backends.cpu.linear_forms import FormName
from penstock.engine.backends.cpu.native import Handle
from penstock.engine.backends.cpu.ops import CpuOps
from penstock.engine.backends.cpu.quant_linear import GgufKind, QuantLinear
from penstock.engine.backends.cpu.tuner import Tuner
from penstock.engine.backends.interface import Activation

BASELINES = [isa for isa in ("neon", "avx2", "avx512") if isa in cpu.isa_choices()]
ISAS = [("native", 1), ("native", 2)]
ISAS_SLOW = [pytest.param((isa, 2), marks=pytest.mark.slow) for isa in ("generic", *BASELINES)]  # compiled for tests
SHAPES = [(1, 32), (16, 32), (17, 64), (100, 96), (33, 1536), (960, 576)]
ROWS = (1, 2, 3, 4, 5, 8, 13, 64, 131, 600)


@pytest.fixture(scope="module", params=[*ISAS, *ISAS_SLOW], ids=lambda p: f"{p[0]}-{p[1]}")
def handle(request: pytest.FixtureRequest) -> Handle:
    isa, threads = request.param
    if not cpu.status(isa).available:
        pytest.skip(cpu.status(isa).detail)
    return Handle(threads, isa)


def exact_rows(rows: int, depth: int, seed: int) -> Tensor:
    """Activations that int8 blocks hold without rounding: integers up to 127, times a power of two per block."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(-127, 128, (rows, depth // 32, 32), generator=generator).float()
    q[..., 3] = 127.0
    return (q * 2.0 ** torch.randint(-9, 3, (rows, depth // 32, 1), generator=generator)).reshape(rows, depth)


def gguf_blocks(kind: str, rows: int, width: int, seed: int, wild: bool = True) -> tuple[Tensor, Tensor]:
    """Random file bytes of a GGUF tensor and the float64 weights they stand for, decoded as the format says.

    `wild` blocks hold anything the format can express; the others are as quantizers write them: positive scales,
    and the extreme codes are used.
    """
    rng = np.random.default_rng(seed)
    count = rows * width // 32
    scale = (rng.random(count) * 0.02 - 0.005 * wild + 1e-3).astype(np.float16)
    if kind == "Q8_0":
        codes = rng.integers(-128 if wild else -127, 128, (count, 32)).astype(np.int8)
        codes[:, 7] = codes[:, 7] if wild else 127
        raw = np.concatenate([scale.view(np.uint8).reshape(-1, 2), codes.view(np.uint8)], axis=1)
        values = codes * scale[:, None].astype(np.float64)
    else:
        codes = rng.integers(0, 256, (count, 16)).astype(np.uint8)
        codes[:, 7] = codes[:, 7] if wild else 0xF0
        nibbles = np.concatenate([codes & 15, codes >> 4], axis=1).astype(np.float64)
        parts = [scale.view(np.uint8).reshape(-1, 2)]
        wide = scale[:, None].astype(np.float64)
        if kind == "Q4_1":
            low = (rng.random(count) * -0.1).astype(np.float16)
            parts.append(low.view(np.uint8).reshape(-1, 2))
            values = nibbles * wide + low[:, None].astype(np.float64)
        else:
            values = (nibbles - 8) * wide
        raw = np.concatenate([*parts, codes], axis=1)
    return torch.from_numpy(raw.reshape(-1).copy()), torch.from_numpy(values.reshape(rows, width))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_gguf_weights_are_used_exactly(handle: Handle, kind: GgufKind) -> None:
    for columns, depth in SHAPES:
        raw, weight = gguf_blocks(kind, columns, depth, seed=columns)
        layer = QuantLinear.from_gguf(handle, kind, raw, (columns, depth))
        for rows in ROWS:
            if rows * columns * depth > 4e7 and handle.isa == "generic":
                continue
            x = exact_rows(rows, depth, seed=rows)
            # What is left is float32 summation over the blocks; minima cancel, so the size of a code counts too.
            size = x.abs().double() @ (weight.abs().T + 0.4)
            error = (layer(x).double() - x.double() @ weight.T).abs()
            assert (error <= 3e-7 * size).all(), (columns, depth, rows, (error / size).max())


def test_error_of_the_whole_is_the_rounding_of_the_activations(handle: Handle) -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(40, 576), torch.randn(200, 576) * 0.05
    exact = x.double() @ weight.double().T
    layer = QuantLinear.from_float(handle, weight)
    # Both sides are rounded by at most half of 1/127 of their block's largest magnitude.
    half_steps = [tensor.reshape(-1, 18, 32).abs().amax(-1) / 254 for tensor in (x, weight)]
    bound = half_steps[0] @ weight.reshape(200, 18, 32).abs().sum(-1).T
    bound += x.reshape(40, 18, 32).abs().sum(-1) @ half_steps[1].T
    assert ((layer(x) - exact).abs() <= 1.1 * bound).all()
    assert (layer(x) - exact).norm() / exact.norm() < 0.01, "typical error is far below the bound"


@pytest.mark.parametrize(("kind", "bits"), [("Q4_1", 4), ("Q8_0", 8)])
def test_dequantized_weights_come_back_to_their_values(handle: Handle, kind: GgufKind, bits: int) -> None:
    raw, weight = gguf_blocks(kind, 48, 96, seed=7, wild=False)
    recovered = QuantLinear.from_float(handle, weight.float(), bits=bits)
    assert torch.equal(recovered.packed, QuantLinear.from_gguf(handle, kind, raw, (48, 96)).packed)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
def test_dtypes_bias_and_float32_logits(handle: Handle, dtype: torch.dtype, bits: int) -> None:
    torch.manual_seed(2)
    weight, bias = torch.randn(50, 64), torch.randn(50)
    layer = integer_only(QuantLinear.from_float(handle, weight, bias, bits=bits))
    plain = QuantLinear.from_float(handle, weight, bits=bits)
    x = torch.randn(9, 64).to(dtype)
    wide = layer(x, out_dtype=torch.float32)
    assert wide.dtype is torch.float32
    torch.testing.assert_close(wide, plain(x.float()) + bias)
    assert layer(x).dtype is dtype
    assert torch.equal(layer(x), wide.to(dtype))


def test_a_row_gets_the_same_bits_in_any_batch(handle: Handle) -> None:
    torch.manual_seed(3)
    for bits in (4, 8):
        layer = QuantLinear.from_float(handle, torch.randn(100, 288), bits=bits)
        x = torch.randn(70, 288)
        together = layer(x)
        for rows in (1, 2, 3, 5, 21):
            assert torch.equal(layer(x[:rows].contiguous()), together[:rows]), (bits, rows)


def test_outliers_zeros_and_bad_numbers(handle: Handle) -> None:
    weight = torch.randn(20, 64)
    layer = QuantLinear.from_float(handle, weight)
    assert torch.equal(layer(torch.zeros(3, 64)), torch.zeros(3, 20))
    x = torch.randn(4, 64)
    x[1, 5], x[2, 40], x[3, 0] = float("nan"), float("inf"), 1e30
    out = layer(x)
    assert out[0].isfinite().all() and out[3].isfinite().all()
    assert out[1].isnan().all() and out[2].isnan().all(), "a broken activation must not look like a number"
    with pytest.raises(LayoutError, match="not finite"):
        QuantLinear.from_float(handle, torch.full((4, 32), float("nan")))


def test_what_is_not_supported_is_refused(handle: Handle) -> None:
    assert QuantLinear.supports((5, 64)) and not QuantLinear.supports((5, 65)) and not QuantLinear.supports((64,))
    with pytest.raises(LayoutError, match="multiple of 32"):
        QuantLinear.from_float(handle, torch.randn(8, 40))
    with pytest.raises(LayoutError, match="bytes"):
        QuantLinear.from_gguf(handle, "Q4_0", torch.zeros(17, dtype=torch.uint8), (1, 32))
    layer = QuantLinear.from_float(handle, torch.randn(8, 32))
    with pytest.raises(LayoutError, match="contiguous"):
        layer(torch.randn(32, 4).t())
    with pytest.raises(LayoutError, match=r"\[T, 32\]"):
        layer(torch.randn(4, 64))
    assert layer(torch.empty(0, 32)).shape == (0, 8)


def test_int16_activations_are_hardly_rounded(handle: Handle) -> None:
    weight, x = torch.randn(96, 320), torch.randn(9, 320) * torch.rand(9, 1) * 10
    layer = QuantLinear.from_float(handle, weight)
    held = QuantLinear.from_float(handle, weight)(torch.eye(320)).T.double()
    exact = x.double() @ held.T
    errors = {}
    for parts in (1, 2):
        layer.activation_parts = parts
        errors[parts] = float((layer(x).double() - exact).norm() / exact.norm())
    assert errors[1] > 1e-3, "int8 rounds visibly, or this test shows nothing"
    assert errors[2] < errors[1] / 100


def integer_only(layer: QuantLinear) -> QuantLinear:
    layer.first_rows.clear()
    return layer


def float16_or_skip(layer: QuantLinear) -> QuantLinear:
    if not layer.fits_float16:
        pytest.skip(f"no float16 vectors in {layer._handle.isa}")
    layer.first_rows.only("float16")
    return layer


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float16_products_stay_near_the_exact_ones(handle: Handle, bits: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(bits)
    for columns, depth in SHAPES:
        weight, bias = torch.randn(columns, depth, generator=generator) * 0.1, torch.randn(columns, generator=generator)
        exact = QuantLinear.from_float(handle, weight, bias, bits=bits)
        half = float16_or_skip(QuantLinear.from_float(handle, weight, bias, bits=bits))
        for rows in ROWS:
            sizes = 10.0 ** (torch.arange(rows) % 8 - 4).unsqueeze(1)  # each row has a range of its own
            x = (torch.randn(rows, depth, generator=generator) * sizes).to(dtype)
            size = x.float().abs() @ (weight.abs().T + 0.1) + bias.abs()
            error = (half(x, torch.float32) - exact(x, torch.float32)).abs()
            assert (error <= 3e-3 * size).all(), (columns, depth, rows, (error / size).max())


def test_a_value_that_is_not_finite_spoils_its_own_row_only(handle: Handle) -> None:
    layer = float16_or_skip(QuantLinear.from_float(handle, torch.ones(40, 64)))
    x = torch.ones(9, 64)
    x[3, 5], x[8, 0] = float("inf"), float("nan")
    spoiled = layer(x).isnan().all(dim=1)
    assert spoiled.nonzero().flatten().tolist() == [3, 8]
    assert torch.allclose(layer(x)[0], torch.full((40,), 64.0))


def in_form(layer: QuantLinear, form: FormName) -> QuantLinear:
    """The layer in one of the forms on matrix tiles, or per channel on vectors, for any number of rows."""
    if form == "per_channel":
        if not layer._handle.has_per_channel:
            pytest.skip("no products of bytes on this CPU")
        layer.keep_per_channel()
    elif not layer._handle.has_matrix:
        pytest.skip("no matrix tiles on this CPU")
    layer.first_rows.only(form)
    return layer


TILE_FORMS: tuple[FormName, ...] = ("per_group", "bfloat16", "per_channel")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("form", TILE_FORMS)
def test_products_of_other_forms_are_those_of_the_weights(handle: Handle, bits: int, form: FormName) -> None:
    """Per group, blocks are multiplied as they are; in bfloat16, weights are rounded to that; per channel, weights and
    rows are rotated and rounded to a 127th of the largest of their channel and row."""
    generator = torch.Generator().manual_seed(bits)
    for columns, depth in (*SHAPES, (96, 1536)):
        weight, bias = torch.randn(columns, depth, generator=generator) * 0.1, torch.randn(columns, generator=generator)
        layer = in_form(QuantLinear.from_float(handle, weight, bias, bits=bits), form)
        exact = integer_only(QuantLinear.from_float(handle, weight, bias, bits=bits))
        for rows in (*ROWS, 16, 17, 33, 64, 100):
            x = torch.randn(rows, depth, generator=generator).bfloat16()
            size = x.float().abs() @ (weight.abs().T + 0.1) + bias.abs()
            error = (layer(x, torch.float32) - exact(x, torch.float32)).abs()
            if form == "per_channel":
                typical = x.float().norm(dim=1, keepdim=True) * weight.norm(dim=1) / depth**0.5
                allowed = 0.12 * typical + 1e-4 * size
                assert (error / typical).square().mean().sqrt() < 0.025, (columns, depth, rows)
            else:
                allowed = (2e-5 if form == "per_group" else 3e-3) * size
            assert (error <= allowed).all(), (columns, depth, rows, (error / allowed).max())


def test_per_channel_an_outlier_does_not_coarsen_the_rest(handle: Handle) -> None:
    generator = torch.Generator().manual_seed(9)
    for depth, allowed in ((576, 0.06), (1536, 0.03)):  # rotated by 64 and by 512
        weight = torch.randn(64, depth, generator=generator)
        layer = in_form(QuantLinear.from_float(handle, weight, bits=8), "per_channel")
        x = torch.randn(20, depth, generator=generator).bfloat16()
        x[torch.arange(20), torch.arange(20) * 28] = 60.0  # a step of 60 / 127 alone would be an error of 0.14
        rest = x.float().clamp(-5, 5).norm(dim=1, keepdim=True)
        error = layer(x, torch.float32) - x.float() @ weight.T
        assert (error / rest).square().mean().sqrt() < allowed


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("form", ["integer", *TILE_FORMS])
def test_a_linear_gates_its_own_outputs(handle: Handle, form: FormName, activation: Activation) -> None:
    """To the bit as if it had written them first."""
    ops, generator = CpuOps(handle), torch.Generator().manual_seed(5)
    for ffn, depth in ((48, 96), (33, 64), (160, 576)):
        weight, bias = torch.randn(2 * ffn, depth, generator=generator) * 0.2, torch.randn(2 * ffn, generator=generator)
        for given in (None, bias):
            layer = QuantLinear.from_float(handle, weight, given, bits=4)
            layer = integer_only(layer) if form == "integer" else in_form(layer, form)
            for rows in (1, 5, 16, 33, 150):
                x = torch.randn(rows, depth, generator=generator).bfloat16()
                gate, up = layer(x, torch.float32).chunk(2, dim=-1)
                act = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
                got = layer.gated(x, activation)
                torch.testing.assert_close(got.float(), act * up, rtol=0.03, atol=0.03)
                apart = ops.silu_mul(layer(x)) if activation == "silu" else ops.gelu_mul(layer(x))
                assert torch.equal(got, apart)


def test_an_odd_number_of_outputs_cannot_be_gated(handle: Handle) -> None:
    with pytest.raises(LayoutError, match="halves"):
        QuantLinear.from_float(handle, torch.ones(3, 32)).gated(torch.ones(1, 32), "silu")


@pytest.mark.parametrize("form", ["per_group", "per_channel"])
def test_per_group_and_per_channel_results_are_batch_invariant(handle: Handle, form: FormName) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(80, 576, generator=generator)
    layer = in_form(QuantLinear.from_float(handle, weight, bits=4), form)
    x = torch.randn(70, 576, generator=generator).bfloat16()
    together = layer(x)
    for begin, end in ((0, 1), (3, 7), (5, 13), (20, 37), (69, 70)):
        assert torch.equal(layer(x[begin:end].contiguous()), together[begin:end])


@pytest.mark.parametrize("form", TILE_FORMS)
def test_a_value_that_is_not_finite_spoils_its_own_row_of_a_tile_only(handle: Handle, form: FormName) -> None:
    layer = in_form(QuantLinear.from_float(handle, torch.ones(40, 64), bits=4), form)
    x = torch.ones(9, 64).bfloat16()
    x[3, 5], x[8, 0], x[6] = float("inf"), float("nan"), 0
    finite = layer(x).isfinite().all(dim=1)
    assert finite.nonzero().flatten().tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert torch.allclose(layer(x)[0].float(), torch.full((40,), 64.0)) and (layer(x)[6] == 0).all()


def test_per_channel_rounding_adds_little_to_the_error_of_few_bits(handle: Handle) -> None:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(256, 576, generator=generator)
    x = torch.randn(32, 576, generator=generator).bfloat16()
    exact = x.double() @ weight.double().T
    per_channel = in_form(QuantLinear.from_float(handle, weight, bits=4), "per_channel")
    per_group = QuantLinear.from_float(handle, weight, bits=4)
    per_group.first_rows.clear()  # exact integers of the blocks
    error = [float((layer(x, torch.float32).double() - exact).norm()) for layer in (per_group, per_channel)]
    assert error[1] < 1.03 * error[0]


@pytest.mark.parametrize("bits", [4, 8])
def test_activation_aware_scaling_rounds_less(handle: Handle, bits: int) -> None:
    generator = torch.Generator().manual_seed(6)
    for out, depth in ((17, 96), (48, 576)):
        sizes = torch.randn(depth, generator=generator).exp()
        x = (torch.randn(37, depth, generator=generator) * sizes).bfloat16()
        layer = QuantLinear.from_float(handle, torch.randn(out, depth, generator=generator), bits=bits)
        exact = layer(x, torch.float32)
        layer = in_form(layer, "per_channel")
        errors = []
        for scale in (None, torch.ones(depth), sizes**0.2):
            if scale is not None:
                layer.scale_per_channel(scale)
            errors.append(float((layer(x, torch.float32) - exact).norm() / exact.norm()))
        assert errors[0] == errors[1] < 0.02 and errors[2] < 0.02
    assert errors[2] < 0.95 * errors[0]
    with pytest.raises(LayoutError, match="scaled"):
        layer.scale_per_channel(torch.ones(3))


def test_weights_beyond_the_range_of_float16_sums_do_not_use_them(handle: Handle) -> None:
    assert not QuantLinear.from_float(handle, torch.full((16, 32), 600.0)).fits_float16
    assert not QuantLinear.from_float(handle, torch.full((16, 32), 600.0), bits=4).fits_float16


def test_the_number_of_rows_is_measured_once_and_kept(tmp_path: Path) -> None:
    handle, path = Handle(1), tmp_path / "tuning.json"
    layer = float16_or_skip(QuantLinear.from_float(handle, torch.randn(64, 96)))
    Tuner(handle, path).tune(layer)
    known = json.loads(path.read_text())
    assert list(known.values()) == [layer.first_rows["float16"]]
    path.write_text(json.dumps(dict.fromkeys(known, 7)))
    Tuner(handle, path).tune(layer)
    assert layer.first_rows["float16"] == 7
    path.write_text("{ damaged")
    Tuner(handle, path).tune(layer)
    assert json.loads(path.read_text()) == dict.fromkeys(known, layer.first_rows["float16"])


@pytest.mark.parametrize("form", ["integer", "per_channel"])
def test_a_linear_samples_from_its_own_outputs(handle: Handle, form: FormName) -> None:
    """The tokens that would be sampled had it written them first: equals, biases, the last columns and all."""
    ops, generator = CpuOps(handle), torch.Generator().manual_seed(8)
    for columns, depth, bias in ((7, 64, None), (300, 96, True), (1000, 576, None)):
        weight = torch.randn(columns, depth, generator=generator)
        weight[columns // 2] = weight[columns // 3]  # the same output twice
        given = torch.randn(columns, generator=generator) if bias else None
        layer = QuantLinear.from_float(handle, weight, given, bits=8)
        layer = integer_only(layer) if form == "integer" else in_form(layer, form)
        for rows in (1, 5, 33):
            x = torch.randn(rows, depth, generator=generator).bfloat16()
            temperatures = torch.rand(rows, generator=generator) * (torch.arange(rows) % 3).float()  # some are greedy
            keys = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
            logits = torch.full((rows, columns), float("nan"))
            tokens = layer.sample(x, temperatures, keys, logits)
            assert torch.equal(tokens, ops.gumbel_argmax(layer(x, torch.float32), temperatures, keys))
            fused = form == "per_channel" and handle.has_matrix
            assert fused == bool(logits.isnan().all())
    with pytest.raises(LayoutError, match="temperatures must be"):
        layer.sample(x, temperatures[:2], keys, logits)
