"""Integers in groups: GGUF types read to their values, and CPU linears on them compute what the values say."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.engine.backends.cpu.group_blocks import linear_of_groups
from penstock.engine.backends.cpu.native import Handle
from penstock.engine.loading.gguf import GGMLType, RawTensor
from penstock.engine.loading.groups import IntGroups, from_gguf, stack
from penstock.engine.quantization.grids import round_int4, round_int8
from tests.engine.loading.test_dequantize import blocks_of

EXACT = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_0", "Q5_1", "Q5_K")


@pytest.fixture(scope="module")
def handle() -> Handle:
    return Handle(1)


def read(kind: str, rows: int, columns: int) -> tuple[IntGroups, np.ndarray]:
    data = blocks_of(GGMLType[kind], rows, columns)
    want = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]).reshape(rows, columns)
    groups = from_gguf(RawTensor(GGMLType[kind], data, (rows, columns)))
    assert groups is not None
    return groups, want


@pytest.mark.parametrize("kind", EXACT)
def test_gguf_types_keep_their_values(kind: str) -> None:
    groups, want = read(kind, 6, 512)
    np.testing.assert_allclose(groups.dense().numpy(), want, rtol=1e-6, atol=1e-6)


def test_q6_k_is_rounded_by_a_fraction_of_its_own_step() -> None:
    groups, want = read("Q6_K", 6, 512)
    error = np.abs(groups.dense().numpy() - want).reshape(6, -1, 32).max(-1)
    top = np.abs(want).reshape(6, -1, 32).max(-1)
    assert groups.bits == 8
    assert (error <= top / 127 * 0.51).all()  # Q6_K's own steps are at least 1/32 of the largest value


def test_types_that_are_no_integers_in_groups_are_left_alone() -> None:
    assert from_gguf(RawTensor(GGMLType.F32, np.zeros((2, 128), np.uint8), (2, 32))) is None


def applied(linear: object, x: Tensor) -> Tensor:
    assert callable(linear)
    return linear(x)


@pytest.mark.parametrize("kind", [*EXACT, "Q6_K"])
def test_cpu_linears_on_gguf_groups(handle: Handle, kind: str) -> None:
    groups, _ = read(kind, 40, 512)
    x = torch.randn(5, 512)
    linear = linear_of_groups(handle, [groups], None, lambda linear: linear)
    want = x.double() @ groups.dense().double().T
    assert linear is not None
    # 8-bit weights with a minimum are rounded once more, to symmetric int8.
    assert float((applied(linear, x) - want).norm() / want.norm()) < (8e-3 if kind in ("Q5_1", "Q5_K") else 1e-3)
    assert linear.weight_bytes <= 48 * 512 * (5 if groups.bits == 4 else 8.5) / 8 + 64 * 3


def test_cpu_linears_of_matrices_that_do_not_go_together(handle: Handle) -> None:
    """Query and key in Q4_K with the value in Q6_K, as common GGUF files have it; or with orders of their own."""
    first, second = read("Q4_K", 32, 256)[0], read("Q6_K", 16, 256)[0]
    shuffled = replace(round_int4(torch.randn(16, 256), 64), order=torch.randperm(256))
    other = replace(round_int4(torch.randn(16, 256), 128), order=torch.randperm(256))
    x, bias = torch.randn(3, 256), torch.randn(80)
    linear = linear_of_groups(handle, [first, second, shuffled, other], bias, lambda linear: linear)
    want = x.double() @ torch.cat([part.dense() for part in (first, second, shuffled, other)]).double().T + bias
    assert float((applied(linear, x) - want).norm() / want.norm()) < 1e-3


def test_groups_of_different_size_stack_into_the_smaller(handle: Handle) -> None:
    parts = [round_int4(torch.randn(16, 128), 64), round_int4(torch.randn(16, 128), 32)]
    whole = stack(parts)
    assert whole is not None and whole.group == 32
    assert torch.equal(whole.dense(), torch.cat([part.dense() for part in parts]))
    assert stack([round_int4(torch.randn(16, 128), 64), round_int8(torch.randn(16, 128), 64)]) is None


def test_a_group_that_is_no_whole_number_of_blocks_stays_dense(handle: Handle) -> None:
    assert linear_of_groups(handle, [round_int8(torch.randn(4, 96), 48)], None, lambda linear: linear) is None
