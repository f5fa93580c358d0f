"""A CUDA device through PyTorch alone: memory, streams, copies. `backend` adds Triton kernels and CUDA graphs."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.engine.adapters.apply import LoraKernel
from penstock.engine.adapters.layout import AdapterLayout
from penstock.engine.backends.backend import Backend, WeightPlan
from penstock.engine.backends.cuda import peer_memory
from penstock.engine.backends.cuda.block_mover import CudaBlockMover
from penstock.engine.backends.cuda.memory import CudaMemory
from penstock.engine.backends.gloo import gloo_group
from penstock.engine.backends.interface import CopyEvent, DeviceMemory, Ops, Staging, StepDefaults
from penstock.engine.backends.reference.linear import DenseLinear
from penstock.engine.backends.reference.lora import ReferenceLora
from penstock.engine.backends.reference.ops import ReferenceOps
from penstock.engine.backends.staging import PinnedStaging
from penstock.engine.config import EngineConfig, WeightForm
from penstock.engine.kv.cache import KVCache
from penstock.engine.kv.mover import BlockMover
from penstock.engine.loading.fp8 import Fp8Checkpoint
from penstock.engine.models.layers.linear import Linear
from penstock.engine.runner.eager import EagerExecutor
from penstock.engine.runner.executor import Executor
from penstock.engine.runner.resources import RunnerResources
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.engine.models.weights import Weights


class TorchCudaBackend(Backend):
    """See `Backend`."""

    defaults = StepDefaults(max_running=256, token_budget=8448, encoder_token_budget=16384, gap_s=0.03)
    """64 prompt tokens for each of an H200's 132 multiprocessors: attention of a long prompt leaves none of them idle
    in its last wave."""
    in_host_memory = False
    overlaps = True
    bounds_are_compiled = False
    calibrates = False
    compiles = False
    offloads = True
    exchange_step_bytes = 64 << 20
    """About a millisecond on a stream of its own."""
    restore_step_bytes: int | None = None
    adapters_by_output = False
    attends_varlen = True

    def __init__(self, device: torch.device) -> None:
        torch.cuda.set_device(device)  # kernels are launched on the current one
        self.device = device
        self.product = torch.cuda.get_device_name(device)
        self.ops: Ops = self._make_ops()
        self.memory: DeviceMemory = CudaMemory(device)

    def _make_ops(self) -> Ops:
        return ReferenceOps()

    def plan_weights(self, config: EngineConfig, dtype: torch.dtype, weights: Weights) -> WeightPlan:
        form = self._weight_form(config, dtype, weights)
        if config.deterministic:
            raise ConfigError("deterministic: true needs triton, which is not installed")
        if form in ("fp8", "int8", "int4"):
            raise ConfigError(f"weights: {form} needs triton, which is not installed")
        return WeightPlan()

    def _weight_form(self, config: EngineConfig, dtype: torch.dtype, weights: Weights) -> WeightForm:
        """The form that is asked for; activations that do not go with it are refused."""
        form = config.weights
        if form == "auto" and isinstance(weights, Fp8Checkpoint) and dtype == torch.bfloat16:
            form = "fp8"
        if config.activations == "int16" or (config.activations == "int8" and form not in ("auto", "int8")):
            raise ConfigError(
                f"activations: {config.activations} on CUDA is not for weights: {form}; use int8 with int8"
            )
        return form

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return DenseLinear(weight, bias)

    def lora_kernel(self, layout: AdapterLayout, slots: int, rank: int, dtype: torch.dtype) -> LoraKernel:
        return ReferenceLora(layout, slots, self.device)

    def executor(self, resources: RunnerResources) -> Executor:
        return EagerExecutor(resources)

    def staging(self) -> Staging:
        return PinnedStaging(self.device)

    def mark(self) -> CopyEvent:
        event: CopyEvent = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()  # type: ignore[attr-defined]
        return event

    def to_host(self, *tensors: Tensor) -> tuple[list[Tensor], CopyEvent | None]:
        return [_to_pinned(tensor) for tensor in tensors], self.mark()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def block_mover(self, kv: KVCache, num_slots: int) -> BlockMover:
        return CudaBlockMover(kv, num_slots)

    def process_group(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        if peer_memory.ranks_per_device(store, rank, size, self.device) > 1:  # NCCL wants a device for each
            return gloo_group(store, rank, size, timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)


def _to_pinned(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
