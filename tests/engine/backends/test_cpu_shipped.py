"""The plain C++ kernels with all optimizations, as they are shipped, against the same references."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from penstock.engine.backends.cpu import build, native
from penstock.engine.backends.cpu.native import Handle
from penstock.engine.backends.cpu.ops import CpuOps
from penstock.engine.backends.interface import FP8, INT8
from tests.engine.backends import test_cpu_float8 as float8
from tests.engine.backends import test_cpu_kv_formats as formats
from tests.engine.backends import test_cpu_linear as linears
from tests.engine.backends import test_cpu_mxfp4 as mxfp4
from tests.engine.backends import test_cpu_ops as operations

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # the library is compiled

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def handle() -> Iterator[Handle]:
    path = build.build_library((build._GENERIC,))
    with mock.patch.object(native, "library", lambda isa: native.Library(path, "generic")):
        yield Handle(2)


@pytest.mark.parametrize("bits", [4, 8])
def test_linears(handle: Handle, bits: int) -> None:
    for dtype in DTYPES:
        linears.test_dtypes_bias_and_float32_logits(handle, dtype, bits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_forms(handle: Handle, dtype: torch.dtype) -> None:
    float8.test_products_are_those_of_the_stored_weights(handle, dtype)
    if dtype != torch.float16:
        mxfp4.test_products_are_those_of_the_stored_weights(handle, dtype)


def test_order_of_summation(handle: Handle) -> None:
    float8.test_results_are_batch_invariant(handle)
    mxfp4.test_results_are_batch_invariant(handle)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", operations.CASES, ids=str)
def test_attention(handle: Handle, dtype: torch.dtype, case: tuple) -> None:  # type: ignore[type-arg]
    operations.test_attention_matches_float64(CpuOps(handle), dtype, case)


@pytest.mark.parametrize("kind", [INT8, FP8], ids=["int8", "fp8"])
def test_a_cache_of_bytes(handle: Handle, kind: torch.dtype) -> None:
    formats.test_attention_reads_what_the_cache_holds(CpuOps(handle), torch.bfloat16, kind)
    formats.test_what_is_written_comes_back_within_half_a_step(CpuOps(handle), kind)
