"""MXFP4 linears: every weight has the value the checkpoint says, in four bits, and results are batch-invariant."""

from __future__ import annotations

import pytest
import torch

from penstock.engine.backends import cpu
from penstock.engine.backends.cpu.mxfp4_linear import Mxfp4Linear
from penstock.engine.backends.cpu.native import Handle
from penstock.engine.loading.mxfp4 import VALUES, Mxfp4, from_gguf_blocks, round_mxfp4
from tests.engine.backends.test_cpu_linear import ISAS, ISAS_SLOW

SHAPES = [(1, 32), (16, 32), (17, 64), (100, 96), (33, 2880)]
ROWS = (1, 2, 3, 4, 5, 7, 13)


@pytest.fixture(scope="module", params=[*ISAS, *ISAS_SLOW], ids=lambda p: f"{p[0]}-{p[1]}")
def handle(request: pytest.FixtureRequest) -> Handle:
    isa, threads = request.param
    if not cpu.status(isa).available:
        pytest.skip(cpu.status(isa).detail)
    return Handle(threads, isa)


def random_weights(out: int, inputs: int) -> Mxfp4:
    generator = torch.Generator().manual_seed(out + inputs)
    blocks = torch.randint(256, (out, inputs // 2), generator=generator, dtype=torch.uint8)
    return Mxfp4(blocks, torch.randint(110, 130, (out, inputs // 32), generator=generator, dtype=torch.uint8))


def test_every_weight_counts_with_its_exact_value(handle: Handle) -> None:
    """Against a one-hot input, where nothing is rounded: all values at all powers of two that float32 has."""
    codes = torch.arange(16, dtype=torch.uint8)
    blocks = (codes | codes.flip(0) << 4).repeat(250, 1)
    exponents = torch.arange(1, 251, dtype=torch.uint8).view(-1, 1)
    layer = Mxfp4Linear(handle, Mxfp4(blocks, exponents))
    values = torch.tensor(VALUES)[torch.stack((codes, codes.flip(0)), 1).flatten().int()].double()
    want = values * torch.exp2(exponents.double() - 127)
    assert torch.equal(layer(torch.eye(32)).T.double(), want)
    assert torch.equal(layer.widened(torch.float32).double(), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_stored_weights(handle: Handle, dtype: torch.dtype) -> None:
    for out, inputs in SHAPES:
        weight, bias = random_weights(out, inputs), torch.randn(out)
        layer, dense = Mxfp4Linear(handle, weight, bias), weight.dense().double()
        assert layer.weight_bytes <= (out + 15) // 16 * 16 * inputs * 17 / 32
        for rows in ROWS:
            x = (torch.randn(rows, inputs) * 0.1).to(dtype)
            got, want = layer(x), x.double() @ dense.T + bias.double()
            size = x.double().abs() @ dense.abs().T + bias.double().abs()
            step = {torch.float32: 3e-6, torch.bfloat16: 2.0**-8}[dtype]
            assert got.dtype == dtype
            assert bool(((got.double() - want).abs() <= step * size).all())


def test_results_are_batch_invariant(handle: Handle) -> None:
    layer = Mxfp4Linear(handle, random_weights(100, 256))
    x = torch.randn(13, 256)
    together = layer(x)
    for rows in range(1, 13):
        assert torch.equal(layer(x[:rows].contiguous()), together[:rows])


def test_many_rows_go_to_the_vendor_with_the_same_weights(handle: Handle) -> None:
    weight = random_weights(33, 256)
    x = torch.randn(200, 256)
    few, many = (Mxfp4Linear(handle, weight, torch.ones(33), many=many)(x) for many in (False, True))
    torch.testing.assert_close(many, few, rtol=1e-4, atol=1e-4)


def test_rounding_keeps_what_has_four_bits_and_gguf_blocks_are_the_same_weights() -> None:
    weight = Mxfp4(random_weights(8, 64).blocks | 0x77, torch.full((8, 2), 120, dtype=torch.uint8))  # every peak is 6
    assert torch.equal(round_mxfp4(weight.dense()).dense(), weight.dense())
    inputs = torch.stack((weight.blocks & 15, weight.blocks >> 4), -1).view(8, 2, 2, 16)
    stored = torch.cat((weight.scales.unsqueeze(-1), inputs[:, :, 0] | inputs[:, :, 1] << 4), -1)
    again = from_gguf_blocks(stored.flatten(1), 8)
    assert torch.equal(again.blocks, weight.blocks) and torch.equal(again.scales, weight.scales)
