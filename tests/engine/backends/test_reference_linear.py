"""Dense linears through PyTorch, in every type that a configuration may ask for."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from penstock.engine.backends.reference import linear
from penstock.engine.backends.reference.backend import ReferenceBackend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_type_has_linears_on_every_processor(dtype: torch.dtype) -> None:
    """oneDNN packs 16-bit weights on some processors only."""
    torch.manual_seed(0)
    weight, bias, x = (torch.randn(*shape).to(dtype) for shape in ((24, 16), (24,), (3, 16)))
    got = ReferenceBackend().linear(weight, bias)(x)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), F.linear(x.float(), weight.float(), bias.float()), rtol=2e-2, atol=5e-2)


@pytest.mark.skipif(not linear.packs(torch.float32), reason="no oneDNN")
def test_large_weights_are_packed_and_small_ones_copied() -> None:
    torch.manual_seed(0)
    for shape, kind in (((96, 64), linear.DenseLinear), ((520, 320), linear.PackedLinear)):
        weight, bias = torch.randn(*shape), torch.randn(shape[0])
        want = weight.clone()
        made = ReferenceBackend().linear(weight, bias)
        assert isinstance(made, kind)
        weight.zero_()
        for rows in (1, 3, 17, 130):
            x = torch.randn(rows, shape[1])
            torch.testing.assert_close(made(x), F.linear(x, want, bias), rtol=1e-4, atol=1e-4)
