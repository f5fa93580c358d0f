"""Every quantized format decodes to exactly what the reference package decodes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from penstock.engine.loading import dequantize as module
from penstock.engine.loading.dequantize import DENSE, dequantize
from penstock.engine.loading.gguf import BLOCK, GGMLType

QUANTIZED = [kind for kind in BLOCK if kind not in DENSE]
HALVES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where the float16 scales lie in the blocks that the reference package cannot write."""


def blocks_of(kind: GGMLType, rows: int, columns: int) -> np.ndarray:
    rng = np.random.default_rng(kind.value)
    reference = gguf.GGMLQuantizationType(kind.value)
    if kind.name not in HALVES:
        return gguf.quants.quantize(rng.standard_normal((rows, columns), dtype=np.float32), reference)
    weights, size = BLOCK[kind]
    data = rng.integers(0, 256, (rows * columns // weights, size), dtype=np.uint8)
    for offset in HALVES[kind.name]:
        scales = rng.standard_normal(len(data)).astype(np.float16)
        data[:, offset : offset + 2] = scales[:, None].view(np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_equals_the_reference(kind: GGMLType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICE_WEIGHTS", 1024)  # several slices, the last one shorter
    rows, columns = 7, 512
    data = blocks_of(kind, rows, columns)
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(kind.value)).reshape(rows, columns)
    found = dequantize(torch.from_numpy(data), kind, (rows, columns))
    assert found.dtype == torch.float32
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_a_quantized_matrix_stays_close_to_the_original(kind: GGMLType) -> None:
    if kind.name in HALVES:
        pytest.skip("the reference package only reads this format")
    rng = np.random.default_rng(1)
    matrix = rng.standard_normal((16, 256), dtype=np.float32)
    data = gguf.quants.quantize(matrix, gguf.GGMLQuantizationType(kind.value))
    error = dequantize(torch.from_numpy(data), kind, matrix.shape).numpy() - matrix
    assert np.sqrt((error**2).mean()) < {"Q8_0": 0.01}.get(kind.name, 0.12)


def test_float_types_come_back_as_stored() -> None:
    values = torch.randn(3, 8)
    for kind, dtype in DENSE.items():
        data = values.to(dtype).view(torch.uint8).reshape(3, -1)
        found = dequantize(data, kind, (3, 8))
        assert found.dtype == dtype
        assert torch.equal(found, values.to(dtype))
