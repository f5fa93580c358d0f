"""Where an engine runs and with which numbers: device, dtype, kernels, memory for the KV cache."""

from __future__ import annotations

import os

import torch

from penstock.engine.config import EngineConfig
from penstock.engine.kernels.cpu.ops import CpuOps
from penstock.engine.kernels.interface import Ops, torch_dtype
from penstock.engine.kernels.reference import ReferenceOps
from penstock.engine.models.build import Quantizer
from penstock.engine.models.config import ModelConfig
from penstock.engine.quantization.cpu_blocks import BlockQuantizer
from penstock.errors import ConfigError

_CPU_KV_SHARE = 0.15
_CUDA_KV_SHARE = 0.85


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


def pick_ops(device: torch.device, threads: int) -> Ops:
    """The fastest kernels available on the device."""
    if device.type == "cuda":
        from penstock.engine.kernels import triton as triton_kernels

        loaded = getattr(triton_kernels, "load", lambda _: None)(device)
    else:
        from penstock.engine.kernels import cpu as cpu_kernels

        loaded = getattr(cpu_kernels, "load", lambda _: None)(threads)
    ops: Ops = loaded or ReferenceOps()
    return ops


def pick_quantizer(config: EngineConfig, ops: Ops) -> Quantizer | None:
    """How linears are kept in few bits here; None when they are dense."""
    native = isinstance(ops, CpuOps)
    if config.weights in ("int8", "int4") and not native:
        raise ConfigError(
            f"weights: {config.weights} needs the native CPU kernels, which are not in use here "
            "(run `penstock doctor` to see why); use weights: dense"
        )
    if config.weights == "dense" or not native:
        return None
    if config.weights == "auto" and (config.dtype != "auto" or cpu_has_bf16()):
        return None
    assert isinstance(ops, CpuOps)
    return BlockQuantizer(ops.handle, config.weights)


def available_memory(device: torch.device) -> int:
    """Bytes that can still be taken on the device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def count_blocks(
    config: EngineConfig,
    model: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    max_running: int,
    max_model_len: int,
) -> int:
    """KV blocks to allocate, the null block included: as asked for, or a share of what is left."""
    if config.num_blocks is not None:
        return config.num_blocks + 1
    block_bytes = config.block_size * model.kv_bytes_per_token(dtype.itemsize)
    share = _CUDA_KV_SHARE if device.type == "cuda" else _CPU_KV_SHARE
    memory = config.kv_memory if config.kv_memory is not None else int(available_memory(device) * share)
    useful = max_running * -(-max_model_len // config.block_size)
    blocks = min(memory // block_bytes, useful)
    if blocks < 1:
        raise ConfigError(
            f"no room for the KV cache: one block needs {block_bytes} bytes, {memory} are allowed; "
            "raise kv_memory or free memory"
        )
    return int(blocks) + 1
