"""The reference backend: plain PyTorch on the CPU, in host memory. The `cpu` backend extends it with native kernels."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.engine.adapters.apply import LoraKernel
from penstock.engine.adapters.layout import AdapterLayout
from penstock.engine.backends.backend import Backend, WeightPlan
from penstock.engine.backends.gloo import gloo_group
from penstock.engine.backends.host_memory import HostMemory
from penstock.engine.backends.interface import CopyEvent, DeviceMemory, Ops, Staging, StepDefaults
from penstock.engine.backends.reference.linear import DenseLinear, PackedLinear, is_small, packs
from penstock.engine.backends.reference.lora import ReferenceLora
from penstock.engine.backends.reference.ops import ReferenceOps
from penstock.engine.backends.staging import HostStaging
from penstock.engine.config import EngineConfig
from penstock.engine.kv.cache import KVCache
from penstock.engine.kv.mover import BlockMover, HostBlockMover
from penstock.engine.models.layers.linear import Linear
from penstock.engine.runner.eager import EagerExecutor
from penstock.engine.runner.executor import Executor
from penstock.engine.runner.resources import RunnerResources
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.engine.models.weights import Weights


class ReferenceBackend(Backend):
    """See `Backend`."""

    device = torch.device("cpu")
    defaults = StepDefaults(
        max_running=64, token_budget=512, encoder_token_budget=1024, gap_s=0.5, gap_yields_s=2.0, prompt_tile=32
    )
    in_host_memory = True
    overlaps = False
    bounds_are_compiled = False
    calibrates = True
    compiles = False
    offloads = False
    exchange_step_bytes = 8 << 20
    """A few milliseconds of copying, which the step waits for."""
    restore_step_bytes: int | None = exchange_step_bytes
    adapters_by_output = False
    attends_varlen = False

    def __init__(self) -> None:
        self.ops: Ops = ReferenceOps()
        self.memory: DeviceMemory = HostMemory()

    def plan_weights(self, config: EngineConfig, dtype: torch.dtype, weights: Weights) -> WeightPlan:
        if config.deterministic:
            raise ConfigError(
                "deterministic: true needs the native kernels; `penstock doctor` says why they are missing"
            )
        if config.weights in ("int8", "int4", "fp8"):
            raise ConfigError(
                f"weights: {config.weights} needs the native CPU kernels, which are not in use here "
                "(run `penstock doctor` to see why); use weights: dense"
            )
        if config.activations != "auto":
            raise ConfigError(f"activations: {config.activations} needs weights in int8 or int4 blocks")
        return WeightPlan()

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        if is_small(weight):
            return DenseLinear(weight.clone(memory_format=torch.contiguous_format), bias)
        return PackedLinear(weight, bias) if packs(weight.dtype) else DenseLinear(weight, bias)

    def lora_kernel(self, layout: AdapterLayout, slots: int, rank: int, dtype: torch.dtype) -> LoraKernel:
        return ReferenceLora(layout, slots, self.device)

    def executor(self, resources: RunnerResources) -> Executor:
        return EagerExecutor(resources)

    def staging(self) -> Staging:
        return HostStaging()

    def mark(self) -> CopyEvent | None:
        return None

    def to_host(self, *tensors: Tensor) -> tuple[list[Tensor], CopyEvent | None]:
        return list(tensors), None

    def block_mover(self, kv: KVCache, num_slots: int) -> BlockMover:
        return HostBlockMover(kv, num_slots)

    def process_group(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        return gloo_group(store, rank, size, timeout)
