"""Where an engine runs and with which numbers: device, dtype, kernels, form of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from penstock.engine.backends.cpu.block_quantizer import BlockQuantizer
from penstock.engine.backends.cpu.dense_linear import DenseLinear
from penstock.engine.backends.cpu.fp8_quantizer import Float8Quantizer
from penstock.engine.backends.cpu.ops import CpuOps
from penstock.engine.backends.interface import FP8, INT8, ActivationOps, Ops, torch_dtype
from penstock.engine.backends.reference.ops import ReferenceOps
from penstock.engine.config import EngineConfig, WeightForm
from penstock.engine.loading.fp8 import Fp8Checkpoint
from penstock.engine.loading.quantized import QuantizedCheckpoint
from penstock.engine.models.build import Quantizer, Weights
from penstock.engine.models.model_config import ModelConfig
from penstock.errors import ConfigError


def pick_device(name: str) -> torch.device:
    """The device called `name`; `auto` takes CUDA when there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is not a device name; use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' was asked for, but torch sees no CUDA device; use device: cpu")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 where the hardware multiplies it, float32 elsewhere."""
    if name != "auto":
        return torch_dtype(name)
    if device.type == "cuda" or cpu_has_bf16():
        return torch.bfloat16
    return torch.float32


def cpu_has_bf16() -> bool:
    """Whether this CPU has bfloat16 matrix or vector instructions (AVX-512 BF16, AMX, Arm BF16)."""
    try:
        with open("/proc/cpuinfo") as file:
            words = set(file.read().split())
    except OSError:
        return False
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


def pick_kv_dtype(config: EngineConfig, dtype: torch.dtype, ops: Ops, model: ModelConfig) -> torch.dtype:
    """Type of the KV cache."""
    if config.kv_dtype == "auto":
        return INT8 if _decodes_bytes(config, dtype, ops, model) else dtype
    return {"full": dtype, "int8": INT8, "fp8": FP8}[config.kv_dtype]


def _decodes_bytes(config: EngineConfig, dtype: torch.dtype, ops: Ops, model: ModelConfig) -> bool:
    """Whether decode attention multiplies an int8 cache as it lies there (`attention_bytes.h` says which)."""
    return (
        isinstance(ops, CpuOps)
        and ops.handle.has_byte_attention
        and dtype == torch.bfloat16
        and model.head_dim % 64 == 0
        and model.num_heads <= 8 * model.num_kv_heads
        and config.block_size % 16 == 0
        and config.ranks == 1
    )


def pick_ops(device: torch.device, threads: int) -> Ops:
    """The fastest kernels available on the device."""
    loaded: Ops | None
    if device.type == "cuda":
        from penstock.engine.backends import cuda as cuda_backend

        loaded = cuda_backend.load(device)
    else:
        from penstock.engine.backends import cpu as cpu_backend

        loaded = cpu_backend.load(threads)
    return loaded or ReferenceOps()


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """How the decoder's linears are made and fed."""

    quantize: Quantizer | None = None
    inner: ActivationOps | None = None
    fused_up_to: int = 0


def check_deterministic(config: EngineConfig, model: ModelConfig, ops: Ops) -> None:
    """Set the kernels to one way of computing; refuse what has none yet."""
    if model.moe is not None:
        raise ConfigError("deterministic: true is not available for mixture-of-experts models")
    if config.adapters or config.adapter_slots:
        raise ConfigError("deterministic: true is not available with adapters")
    if config.ranks > 1:
        raise ConfigError("deterministic: true works on one device; leave out tensor_parallel and pipeline_parallel")
    if hasattr(ops, "fixed"):
        ops.fixed = True


def plan_weights(
    config: EngineConfig, ops: Ops, device: torch.device, dtype: torch.dtype, weights: Weights
) -> WeightPlan:
    """Choose the form of the weights; one that cannot be had here is refused. Few-bit checkpoints stay as they are."""
    if config.deterministic:
        return _plan_fixed(config, ops, device, dtype, weights)
    if device.type == "cuda":
        return _plan_cuda(config, ops, device, dtype, weights)
    plan = _plan_cpu(config, ops, dtype, weights)
    if config.activations != "auto" and not isinstance(plan.quantize, BlockQuantizer):
        raise ConfigError(f"activations: {config.activations} needs weights in int8 or int4 blocks")
    return plan


def _plan_cpu(config: EngineConfig, ops: Ops, dtype: torch.dtype, weights: Weights) -> WeightPlan:
    native = ops if isinstance(ops, CpuOps) else None
    if config.weights in ("int8", "int4", "fp8") and native is None:
        raise ConfigError(
            f"weights: {config.weights} needs the native CPU kernels, which are not in use here "
            "(run `penstock doctor` to see why); use weights: dense"
        )
    matrix = native is not None and native.handle.has_matrix and dtype == torch.bfloat16
    blocks = config.weights in ("int8", "int4") or (
        config.weights == "auto"
        and (isinstance(weights, QuantizedCheckpoint) or (config.dtype == "auto" and not cpu_has_bf16()))
    )
    as_stored = config.weights == "fp8" or (config.weights == "auto" and isinstance(weights, Fp8Checkpoint))
    if native is None or not (matrix or blocks or as_stored):
        return WeightPlan()
    # A lone sequence is verified in the arithmetic in which it decodes, or guessing would change close decisions.
    steady = 0 if config.speculation == "off" else config.speculation_depth + 2
    form: WeightForm = "dense" if config.weights == "fp8" else config.weights
    rest = BlockQuantizer(native.handle, form, config.activations, matrix, config.deterministic, steady)
    if not as_stored:
        return WeightPlan(rest)
    many = not config.deterministic
    rounding = config.weights == "fp8"
    return WeightPlan(Float8Quantizer(native.handle, rest if matrix or blocks else None, rounding=rounding, many=many))


def _plan_fixed(
    config: EngineConfig, ops: Ops, device: torch.device, dtype: torch.dtype, weights: Weights
) -> WeightPlan:
    """Linears whose results do not depend on the number of rows."""
    from penstock.engine.quantization.batch_invariant import FixedLinears

    if isinstance(ops, CpuOps):
        plan = _plan_cpu(config, ops, dtype, weights)
        return WeightPlan(FixedLinears(partial(DenseLinear, ops.handle), plan.quantize, device, dtype))
    if ops.name != "triton":
        raise ConfigError("deterministic: true needs the native kernels (run `penstock doctor` to see why they lack)")
    if config.weights not in ("auto", "dense"):
        raise ConfigError("deterministic: true on CUDA needs weights: dense")
    from penstock.engine.backends.cuda.kernels.matmul import FixedLinear

    return WeightPlan(FixedLinears(FixedLinear, None, device, dtype))


def _plan_cuda(
    config: EngineConfig, ops: Ops, device: torch.device, dtype: torch.dtype, weights: Weights
) -> WeightPlan:
    form = config.weights
    if form == "auto" and isinstance(weights, Fp8Checkpoint) and dtype == torch.bfloat16:
        form = "fp8"
    if config.activations == "int16" or (config.activations == "int8" and form not in ("auto", "int8")):
        raise ConfigError(f"activations: {config.activations} on CUDA is not for weights: {form}; use int8 with int8")
    if ops.name != "triton":
        if form in ("fp8", "int8", "int4"):
            raise ConfigError(f"weights: {form} needs triton, which is not installed")
        return WeightPlan()
    from penstock.engine.backends.cuda.fp8_quantizer import Fp8Activations, Fp8Quantizer
    from penstock.engine.backends.cuda.group_quantizer import GroupQuantizer
    from penstock.engine.backends.cuda.kernels.gemv import MAX_BATCH

    if form == "dense":
        return WeightPlan(fused_up_to=MAX_BATCH)
    if form != "fp8":
        return WeightPlan(GroupQuantizer(device, dtype, form, config.activations), fused_up_to=MAX_BATCH)
    if dtype != torch.bfloat16:
        raise ConfigError("weights: fp8 needs dtype: bfloat16")
    return WeightPlan(Fp8Quantizer(device, dtype), Fp8Activations(), MAX_BATCH)
