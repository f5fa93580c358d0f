"""The kernels written for AVX-512 and AMX, on any CPU (`emulated/immintrin.h`), against the same references."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from penstock.engine.backends.cpu import native
from penstock.engine.backends.cpu.block_quantizer import BlockQuantizer
from penstock.engine.backends.cpu.build import InstructionSet, build_library
from penstock.engine.backends.cpu.linear_forms import FormName
from penstock.engine.backends.cpu.native import Handle
from penstock.engine.backends.cpu.ops import CpuOps
from penstock.engine.backends.cpu.quant_linear import QuantLinear
from penstock.engine.backends.interface import FP8, INT8, HeadLayout
from tests.engine.backends import test_cpu_kv_formats as formats
from tests.engine.backends import test_cpu_latent as latents
from tests.engine.backends import test_cpu_linear as linears
from tests.engine.backends import test_cpu_mxfp4 as mxfp4
from tests.engine.backends import test_cpu_ops as operations

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # the library is compiled, every instruction is a loop

_FEATURES = (
    "AVX512F", "AVX512BW", "AVX512VL", "AVX512DQ", "AVX512VNNI", "AVX512BF16", "AMX_TILE", "AMX_BF16", "AMX_INT8",
    "AVX512VBMI",
)  # fmt: skip


@pytest.fixture(scope="module")
def handle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Handle]:
    yield from emulated("amx", _FEATURES, tmp_path_factory)


@pytest.fixture(scope="module", params=["avx512", "avx512vnni"])
def vectors(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Handle]:
    """AVX-512 without tiles, without and with dot products of bytes."""
    yield from emulated(request.param, _FEATURES[: 5 if request.param == "avx512vnni" else 4], tmp_path_factory)


def emulated(name: str, features: tuple[str, ...], factory: pytest.TempPathFactory) -> Iterator[Handle]:
    """On two threads, of a library compiled as if this CPU had those instructions."""
    here = Path(__file__).parent / "emulated"
    flags = ("-O1", "-U__ARM_NEON", f"-I{here}", *(f"-D__{feature}__" for feature in features), "-w")
    path = build_library((InstructionSet(name, flags),), factory.mktemp("emulated"))
    with mock.patch.object(native, "library", lambda isa: native.Library(path, name)):
        yield Handle(2)


def test_the_library_believes_it_has_tiles(handle: Handle) -> None:
    assert handle.has_matrix and handle.isa.startswith("avx512")


def test_linears_on_vectors(vectors: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    assert vectors.has_per_channel and not vectors.has_matrix
    test_linears_on_tiles(vectors, "per_channel", monkeypatch)
    test_per_channel_rounding(vectors)


@pytest.mark.parametrize("form", linears.TILE_FORMS)
def test_linears_on_tiles(handle: Handle, form: FormName, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "SHAPES", [(1, 32), (17, 64), (100, 96), (48, 576)])
    monkeypatch.setattr(linears, "ROWS", (1, 3, 5, 13, 131))
    for bits in (4, 8):
        linears.test_products_of_other_forms_are_those_of_the_weights(handle, bits, form)
    linears.test_a_value_that_is_not_finite_spoils_its_own_row_of_a_tile_only(handle, form)
    for activation in ("silu", "gelu_tanh"):
        linears.test_a_linear_gates_its_own_outputs(handle, form, activation)
    if form in ("per_group", "per_channel"):
        linears.test_per_group_and_per_channel_results_are_batch_invariant(handle, form)


def test_per_channel_rounding(handle: Handle) -> None:
    linears.test_per_channel_an_outlier_does_not_coarsen_the_rest(handle)
    linears.test_per_channel_rounding_adds_little_to_the_error_of_few_bits(handle)
    for bits in (4, 8):
        linears.test_activation_aware_scaling_rounds_less(handle, bits)


def test_a_linear_samples_from_its_own_outputs(handle: Handle) -> None:
    linears.test_a_linear_samples_from_its_own_outputs(handle, "per_channel")


def test_every_linear_has_a_per_channel_copy(handle: Handle) -> None:
    """Whether its few bits are stored or made when loaded."""
    weights = mock.Mock(tensor=lambda name: torch.randn(48, 64))
    for form in ("int8", "int4"):
        quantizer = BlockQuantizer(handle, form, matrix=True, per_channel=True)
        for name in ("model.embed_tokens.weight", "lm_head.weight", "q_proj.weight"):
            linear = quantizer(weights, {name: 48}, 64, None)
            assert isinstance(linear, QuantLinear) and linear.per_channel is not None


def test_integer_dots(handle: Handle) -> None:
    for bits in (4, 8):
        linears.test_dtypes_bias_and_float32_logits(handle, torch.bfloat16, bits)


@pytest.mark.parametrize("case", [case for case in operations.CASES if case[2] % 32 == 0], ids=str)
def test_attention_on_tiles(handle: Handle, case: tuple) -> None:  # type: ignore[type-arg]
    operations.test_attention_matches_float64(CpuOps(handle), torch.bfloat16, case)


@pytest.mark.parametrize("kind", [INT8, FP8], ids=["int8", "fp8"])
def test_a_cache_of_bytes(handle: Handle, kind: torch.dtype) -> None:
    formats.test_attention_reads_what_the_cache_holds(CpuOps(handle), torch.bfloat16, kind)
    formats.test_what_is_written_comes_back_within_half_a_step(CpuOps(handle), kind)


@pytest.mark.parametrize("window", [None, 37])
def test_capped_scores_on_tiles(handle: Handle, window: int | None) -> None:
    torch.manual_seed(11)
    layout = HeadLayout(4, 2, 32, 0.5, window, softcap=3.0)
    batch, num_blocks = operations.make_batch([(1, 1), (200, 1), (33, 33), (90, 20)], 16, seed=11)
    q = (3 * torch.randn(batch.positions.shape[0], 4, 32)).bfloat16()
    k_cache, v_cache = (torch.randn(num_blocks, 2, 16, 32).bfloat16() for _ in range(2))
    exact = operations.exact_attention(q, layout, batch, k_cache, v_cache)
    operations.close(CpuOps(handle).attention(q, layout, batch, k_cache, v_cache), exact, torch.bfloat16)


def test_sinks_on_tiles(handle: Handle) -> None:
    """Decodes and prompts, whose totals are kept in other units there."""
    for window in (None, 37):
        operations.test_sinks_match_float64(CpuOps(handle), torch.bfloat16, window)


def test_mxfp4(handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mxfp4, "SHAPES", [(1, 32), (17, 64), (33, 96)])
    mxfp4.test_every_weight_counts_with_its_exact_value(handle)
    mxfp4.test_products_are_those_of_the_stored_weights(handle, torch.float32)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, INT8, FP8], ids=str)
def test_latents(handle: Handle, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latents, "ops", CpuOps(handle))
    for shape in latents.SHAPES:
        latents.test_it_equals_the_definition(shape, kind)
    if kind == torch.float32:
        latents.test_results_do_not_depend_on_the_batch(kind)
