"""The CPU backend: the native library for operations and few-bit linears, and steps recorded once and run natively."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.engine.adapters.apply import LoraKernel
from penstock.engine.adapters.layout import AdapterLayout
from penstock.engine.backends.backend import InputObserver, WeightPlan
from penstock.engine.backends.cpu.block_quantizer import BlockQuantizer
from penstock.engine.backends.cpu.calibration import ActivationObserver
from penstock.engine.backends.cpu.dense_linear import DenseLinear
from penstock.engine.backends.cpu.executor import RecordedExecutor
from penstock.engine.backends.cpu.fp8_quantizer import Float8Quantizer
from penstock.engine.backends.cpu.lora import CpuLora
from penstock.engine.backends.cpu.mxfp4_linear import Mxfp4Quantizer
from penstock.engine.backends.cpu.ops import CpuOps
from penstock.engine.backends.cpu.quant_linear import QuantLinear
from penstock.engine.backends.interface import INT8, NativeLibrary
from penstock.engine.backends.reference.backend import ReferenceBackend
from penstock.engine.config import EngineConfig, WeightForm
from penstock.engine.loading.fp8 import Fp8Checkpoint
from penstock.engine.loading.mxfp4 import has_mxfp4
from penstock.engine.loading.quantized import QuantizedCheckpoint
from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.quantization.batch_invariant import BatchInvariantLinears
from penstock.engine.runner.executor import Executor
from penstock.engine.runner.resources import RunnerResources
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.engine.models.decoder import Decoder
    from penstock.engine.models.weights import Weights


def has_bfloat16() -> bool:
    """Whether this CPU has bfloat16 matrix or vector instructions (AVX-512 BF16, AMX, Arm BF16)."""
    try:
        with open("/proc/cpuinfo") as file:
            words = set(file.read().split())
    except OSError:
        return False
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


class CpuBackend(ReferenceBackend):
    """See `Backend`. One per engine, or shared by an engine and its draft model: `ops` own the thread pool."""

    invariant_adapters = True

    def __init__(self, ops: CpuOps) -> None:
        super().__init__()
        self.ops = self._native = ops
        self.native: NativeLibrary = ops.handle

    @property
    def _has_byte_vectors(self) -> bool:
        """Whether several rows are multiplied in bytes, on vectors: x86 CPUs without matrix tiles."""
        return self._native.handle.has_per_channel and not self._native.handle.has_matrix

    def _auto_kv_dtype(self, config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> torch.dtype:
        """int8 where decode attention multiplies an int8 cache as stored (csrc/attention/amx/decode_int8.h), and on x86
        CPUs without bfloat16, unless float32 is asked for: reading the cache is what bounds attention there."""
        handle = self._native.handle
        if model.latent is not None:
            return dtype
        if self._has_byte_vectors:
            return INT8 if dtype == torch.float32 and config.dtype == "auto" else dtype
        multiplies_bytes = (
            handle.has_byte_attention
            and dtype == torch.bfloat16
            and model.head_dim % 64 == 0
            and model.num_heads <= 8 * model.num_kv_heads
            and config.block_size % 16 == 0
        )
        return INT8 if multiplies_bytes else dtype

    def plan_weights(self, config: EngineConfig, dtype: torch.dtype, weights: Weights) -> WeightPlan:
        plan = self._plan(config, dtype, weights)
        if has_mxfp4(weights) and config.weights != "dense":
            quantize = Mxfp4Quantizer(self._native.handle, plan.quantize, many=not config.deterministic)
            plan = dataclasses.replace(plan, quantize=quantize)
        if config.deterministic:
            dense = partial(DenseLinear, self._native.handle)
            return WeightPlan(BatchInvariantLinears(dense, plan.quantize, self.device, dtype))
        rounded = plan.quantize.rest if isinstance(plan.quantize, Mxfp4Quantizer) else plan.quantize
        if config.activations != "auto" and not isinstance(rounded, BlockQuantizer):
            raise ConfigError(f"activations: {config.activations} needs weights in int8 or int4 blocks")
        return plan

    def _plan(self, config: EngineConfig, dtype: torch.dtype, weights: Weights) -> WeightPlan:
        handle = self._native.handle
        matrix = handle.has_matrix and dtype == torch.bfloat16
        few_bits_pay = not has_bfloat16() or self._has_byte_vectors
        blocks = config.weights in ("int8", "int4") or (
            config.weights == "auto"
            and (isinstance(weights, QuantizedCheckpoint) or (config.dtype == "auto" and few_bits_pay))
        )
        as_stored = config.weights == "fp8" or (config.weights == "auto" and isinstance(weights, Fp8Checkpoint))
        if not (matrix or blocks or as_stored):
            return WeightPlan()
        # A lone sequence is verified in the arithmetic it decodes in; otherwise draft tokens would change close calls.
        steady = 0 if config.speculation == "off" else config.speculation_depth + 2
        form: WeightForm = "dense" if config.weights == "fp8" else config.weights
        per_channel = matrix or (self._has_byte_vectors and config.dtype != "float32")
        rest = BlockQuantizer(handle, form, config.activations, matrix, config.deterministic, steady, per_channel)
        if not as_stored:
            return WeightPlan(rest)
        many = not config.deterministic
        rounding = config.weights == "fp8"
        return WeightPlan(Float8Quantizer(handle, rest if matrix or blocks else None, rounding=rounding, many=many))

    def as_head(self, linear: Linear) -> Linear:
        if isinstance(linear, QuantLinear):
            linear.out_dtype = torch.float32
        return linear

    def input_observers(self, linears: Iterable[Linear]) -> list[InputObserver]:
        kept = (linear for linear in linears if isinstance(linear, QuantLinear) and linear.per_channel is not None)
        return [ActivationObserver(linear) for linear in kept]

    def int8_linear(self, weight: Tensor, bias: Tensor) -> Callable[[Tensor], Tensor] | None:
        if weight.dtype is not torch.float32:
            return super().int8_linear(weight, bias)
        if not QuantLinear.supports(tuple(weight.shape)):
            return None
        linear = QuantLinear.from_float(self._native.handle, weight, bias, bits=8)
        linear.activation_parts = 1
        return linear

    def lora_kernel(self, layout: AdapterLayout, slots: int, rank: int, dtype: torch.dtype) -> LoraKernel:
        return CpuLora(self._native.handle, layout, slots, dtype)

    def adapter_dtype(
        self, decoder: Decoder, layout: AdapterLayout, dtype: torch.dtype, anywhere: Callable[[bool], bool]
    ) -> torch.dtype:
        """float16 beside few-bit weights: far finer than those, and half the bytes of float32 to read."""
        site = layout.sites[0]
        mixers = [getattr(layer.mixer, "attention", layer.mixer) for layer in decoder.layers]
        first: Any = next((mixer for mixer in mixers if hasattr(mixer, site.attribute)), None)
        stored = 0 if first is None else getattr(first, site.attribute).weight_bytes
        # A stage may have no such layer.
        few_bits = anywhere(0 < stored < 2 * site.inputs * site.outputs)
        return torch.float16 if few_bits and dtype == torch.float32 else dtype

    def executor(self, resources: RunnerResources) -> Executor:
        return RecordedExecutor(resources, self._native)
