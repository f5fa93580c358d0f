"""The CUDA backend: Triton kernels, few-bit linears on them, and decode steps as CUDA graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.engine.adapters.apply import LoraKernel
from penstock.engine.adapters.layout import AdapterLayout
from penstock.engine.adapters.norms import Norm, Norms
from penstock.engine.adapters.runtime import AdaptedModel
from penstock.engine.adapters.vectors import Vectors
from penstock.engine.backends.backend import Backend, PeerGroup, WeightPlan
from penstock.engine.backends.cuda.block_fp8_linear import BlockFp8Quantizer
from penstock.engine.backends.cuda.device import TorchCudaBackend
from penstock.engine.backends.cuda.experts import group, with_shared
from penstock.engine.backends.cuda.fp8_quantizer import Fp8Activations, Fp8Quantizer, InvariantFp8
from penstock.engine.backends.cuda.graph_memory import graph_bytes
from penstock.engine.backends.cuda.graphs import GraphExecutor, GraphFollower
from penstock.engine.backends.cuda.group_quantizer import GroupQuantizer
from penstock.engine.backends.cuda.kernels.common import overlap_launches
from penstock.engine.backends.cuda.kernels.gemv import MAX_BATCH
from penstock.engine.backends.cuda.kernels.matmul import BatchInvariantLinear
from penstock.engine.backends.cuda.latents import CHOICE_BYTES
from penstock.engine.backends.cuda.linear import CudaLinear
from penstock.engine.backends.cuda.long_prompts import check_fp8_attention, room_for_gathered
from penstock.engine.backends.cuda.lora import TritonLora
from penstock.engine.backends.cuda.mxfp4_linear import Mxfp4Quantizer
from penstock.engine.backends.cuda.ops import TritonOps
from penstock.engine.backends.cuda.peer_group import CudaPeerGroup
from penstock.engine.backends.cuda.slot_tables import NormTable, VectorTable
from penstock.engine.backends.cuda.warmup import compile_kernels
from penstock.engine.backends.interface import Ops, StepLimits
from penstock.engine.config import EngineConfig, WeightForm
from penstock.engine.kv.cache import KVCache
from penstock.engine.loading.fp8 import Fp8Checkpoint
from penstock.engine.loading.mxfp4 import has_mxfp4
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.families import read_config
from penstock.engine.models.layers.experts import ExpertMlp
from penstock.engine.models.layers.feed_forward import FeedForward, GatedMlp
from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.models.weights import Quantizer
from penstock.engine.quantization.batch_invariant import BatchInvariantLinears
from penstock.engine.quantization.stored import stores_groups
from penstock.engine.runner.executor import Executor
from penstock.engine.runner.follower import Follower, FollowerResources
from penstock.engine.runner.resources import RunnerResources
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.engine.models.weights import Weights


class CudaBackend(TorchCudaBackend):
    """See `Backend`."""

    bounds_are_compiled = True
    compiles = True
    adapters_by_output = True
    invariant_adapters = True

    def _make_ops(self) -> Ops:
        overlap_launches(torch.cuda.get_device_capability(self.device) >= (9, 0))
        return TritonOps(self.device)

    def plan_weights(self, config: EngineConfig, dtype: torch.dtype, weights: Weights) -> WeightPlan:
        form = self._weight_form(config, dtype, weights)
        if config.deterministic:
            few_bits = self._invariant(form, config, dtype, weights)
            return WeightPlan(BatchInvariantLinears(BatchInvariantLinear, few_bits, self.device, dtype))
        if form == "fp8" and config.weights == "auto" and _stays_in_tiles(weights):
            plan = WeightPlan(BlockFp8Quantizer(self.device))
        elif form == "auto" and not stores_groups(weights):
            plan = self._plan("dense", config, dtype)
        else:
            plan = self._plan(form, config, dtype)
        if has_mxfp4(weights) and config.weights != "dense":
            return dataclasses.replace(plan, quantize=Mxfp4Quantizer(self.device, plan.quantize))
        return plan

    def attend_in_fp8(self, model: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype, longest_chunk: int) -> None:
        assert isinstance(self.ops, TritonOps)
        if self.ops.hopper_prefill is None:
            super().attend_in_fp8(model, dtype, kv_dtype, longest_chunk)
        check_fp8_attention(model, dtype, kv_dtype, longest_chunk)
        self.ops.fp8_attention = True

    def _plan(self, form: WeightForm, config: EngineConfig, dtype: torch.dtype) -> WeightPlan:
        if form == "dense":
            return WeightPlan(fused_up_to=MAX_BATCH)
        if form != "fp8":
            quantizer = GroupQuantizer(self.device, dtype, form, config.activations)
            return WeightPlan(quantizer, fused_up_to=MAX_BATCH)
        if dtype != torch.bfloat16:
            raise ConfigError("weights: fp8 needs dtype: bfloat16")
        return WeightPlan(Fp8Quantizer(self.device, dtype), Fp8Activations(), MAX_BATCH)

    def _invariant(
        self, form: WeightForm, config: EngineConfig, dtype: torch.dtype, weights: Weights
    ) -> Quantizer | None:
        """Of deterministic mode: the same weights, and activations as they are."""
        if config.activations == "int8":
            raise ConfigError("deterministic: true on CUDA leaves activations as they are: remove activations: int8")
        few_bits: Quantizer | None = None
        if form == "fp8":
            if dtype != torch.bfloat16:
                raise ConfigError("weights: fp8 needs dtype: bfloat16")
            tiled = config.weights == "auto" and isinstance(weights, Fp8Checkpoint) and weights.tiled
            few_bits = InvariantFp8(BlockFp8Quantizer(self.device) if tiled else Fp8Quantizer(self.device, dtype))
        elif form != "dense":
            few_bits = GroupQuantizer(self.device, dtype, form, fixed=True)
        if has_mxfp4(weights) and form != "dense":
            few_bits = Mxfp4Quantizer(self.device, few_bits, fixed=True)
        return few_bits

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return CudaLinear(weight, bias)

    def experts(self, stored: Callable[[], ExpertMlp], widened: Callable[[], ExpertMlp]) -> FeedForward:
        """The grouped kernels read what is alike for all experts of a layer; what is not is widened."""
        return group(stored()) or group(widened()) or stored()

    def with_shared(self, routed: FeedForward, shared: GatedMlp, gate: Linear | None) -> FeedForward:
        return with_shared(routed, shared, gate)

    def observable(self) -> Backend:
        """Here experts are stacked, and their inputs cannot be observed one by one."""
        return TorchCudaBackend(self.device)

    def lora_kernel(self, layout: AdapterLayout, slots: int, rank: int, dtype: torch.dtype) -> LoraKernel:
        return TritonLora(layout, slots, rank, dtype, self.device, fixed=self.ops.batch_invariant)

    def vector_bank(self, layout: AdapterLayout, slots: int, *, reserved: bool) -> Vectors:
        if not reserved:
            return super().vector_bank(layout, slots, reserved=False)
        return VectorTable(layout, slots, self.device)

    def norm_bank(self, norms: Sequence[tuple[Norm, Tensor]], slots: int, *, reserved: bool) -> Norms:
        if not reserved:
            return super().norm_bank(norms, slots, reserved=False)
        return NormTable(norms, slots, self.device)

    def executor(self, resources: RunnerResources) -> Executor:
        return GraphExecutor(resources)

    def follower(self, resources: FollowerResources) -> Follower:
        return GraphFollower(resources)

    def peer_group(self, store: Any, rank: int, size: int, timeout: timedelta) -> PeerGroup | None:
        return CudaPeerGroup.meet(store, rank, size, self.device, timeout.total_seconds())

    def compile(
        self,
        decoder: Decoder,
        kv_dtype: torch.dtype,
        limits: StepLimits,
        adapters: AdaptedModel | None,
        done: Collection[object] = (),
        wanted: Callable[[], bool] = lambda: True,
    ) -> Collection[object]:
        torch.cuda.set_device(self.device)  # a thread begins with the first one
        return compile_kernels(decoder, kv_dtype, limits, adapters, done, wanted)

    def long_context_bytes(self, decoder: Decoder, kv: KVCache) -> int:
        return room_for_gathered(decoder, kv) + (0 if decoder.captured_context is None else CHOICE_BYTES)

    def graph_bytes(self, decoder: Decoder, limits: StepLimits) -> int:
        return graph_bytes(decoder, limits)


def _stays_in_tiles(weights: Weights) -> bool:
    """Layers that fuse into few launches have kernels for scales per row alone."""
    return isinstance(weights, Fp8Checkpoint) and weights.tiled and not read_config(weights.config).plain_layers
