"""FP8 linears: every weight has the value the checkpoint says, in a byte, and results are batch-invariant."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.engine.backends import cpu
from penstock.engine.backends.cpu.float8_linear import Float8Linear
from penstock.engine.backends.cpu.layout import LayoutError
from penstock.engine.backends.cpu.native import Handle
from tests.engine.backends.test_cpu_linear import ISAS, ISAS_SLOW

SHAPES = [(1, 32), (16, 32), (17, 64), (100, 96), (33, 1536), (960, 576)]
ROWS = (1, 2, 3, 4, 5, 7, 13, 130)


@pytest.fixture(scope="module", params=[*ISAS, *ISAS_SLOW], ids=lambda p: f"{p[0]}-{p[1]}")
def handle(request: pytest.FixtureRequest) -> Handle:
    isa, threads = request.param
    if not cpu.status(isa).available:
        pytest.skip(cpu.status(isa).detail)
    return Handle(threads, isa)


def random_weights(columns: int, depth: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Any byte that is a number, subnormal ones too; scales; and what they stand for in float64."""
    generator = torch.Generator().manual_seed(columns + depth)
    raw = torch.randint(0, 256, (columns, depth), generator=generator, dtype=torch.uint8)
    raw[(raw & 0x7F) == 0x7F] = 0x08
    scale = torch.rand(columns, groups, generator=generator) * 0.01 + 1e-4
    weight = raw.view(torch.float8_e4m3fn)
    return weight, scale, weight.double() * scale.double().repeat_interleave(depth // groups, 1)


def test_every_weight_counts_with_its_exact_value(handle: Handle) -> None:
    """Against a one-hot input, where nothing is rounded: all 254 numbers of the format."""
    raw = torch.tensor([byte for byte in range(256) if byte & 0x7F != 0x7F] + [0, 0], dtype=torch.uint8)
    weight = raw.view(torch.float8_e4m3fn).view(8, 32)
    layer = Float8Linear(handle, weight, torch.full((8, 1), 0.5))
    assert torch.equal(layer(torch.eye(32)), weight.float().T * 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_are_those_of_the_stored_weights(handle: Handle, dtype: torch.dtype) -> None:
    for columns, depth in SHAPES:
        for groups in {1, depth // 32}:
            weight, scale, dense = random_weights(columns, depth, groups)
            bias = torch.randn(columns)
            layer = Float8Linear(handle, weight, scale, bias)
            for rows in ROWS:
                x = (torch.randn(rows, depth) * 0.1).to(dtype)
                got, want = layer(x), x.double() @ dense.T + bias.double()
                size = x.double().abs() @ dense.abs().T + bias.double().abs()
                step = {torch.float32: 3e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
                assert got.dtype == dtype
                assert bool(((got.double() - want).abs() <= step * size).all())


def test_results_are_batch_invariant(handle: Handle) -> None:
    weight, scale, _ = random_weights(100, 256, 2)
    layer = Float8Linear(handle, weight, scale)
    x = torch.randn(13, 256)
    together = layer(x)
    for rows in range(1, 13):
        assert torch.equal(layer(x[:rows].contiguous()), together[:rows])
    assert torch.equal(layer(x[5:6].contiguous()), together[5:6])


def test_many_rows_go_to_the_vendor_with_the_same_weights(handle: Handle) -> None:
    weight, scale, dense = random_weights(33, 256, 2)
    layer = Float8Linear(handle, weight, scale, torch.ones(33))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(layer.widened(dtype), dense.float().to(dtype))
    x = torch.randn(200, 256)
    few = layer(x)
    torch.testing.assert_close(layer.take_many()(x), few, rtol=1e-4, atol=1e-4)


def test_a_byte_per_weight_and_what_cannot_be_held_is_refused(handle: Handle) -> None:
    weight, scale, _ = random_weights(64, 512, 1)
    assert Float8Linear(handle, weight, scale).weight_bytes == 64 * 512 + 64 * 4
    broken = weight.view(torch.uint8).clone()
    broken[3, 3] = 0xFF
    with pytest.raises(LayoutError, match="not finite"):
        Float8Linear(handle, broken.view(torch.float8_e4m3fn), scale)
    with pytest.raises(LayoutError, match="not supported"):
        Float8Linear(handle, weight[:, :40].contiguous(), scale)
    with pytest.raises(LayoutError, match="must be"):
        Float8Linear(handle, weight, scale)(torch.zeros(1, 32))


def test_rounding_at_load_is_to_nearest_with_a_scale_per_output(handle: Handle) -> None:
    weight = torch.randn(40, 128) * torch.rand(40, 1)
    got = Float8Linear.from_float(handle, weight)(torch.eye(128)).T
    step = weight.abs().amax(1, keepdim=True) / 448 * 2.0**-9  # the smallest of the format
    assert bool(((got - weight).abs() <= (weight.abs() / 16).maximum(step / 2) * 1.001).all())
