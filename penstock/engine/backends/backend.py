"""The interface `Backend`: everything that depends on a device, for the modules that put an engine together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.engine.adapters.apply import LoraKernel
from penstock.engine.adapters.layout import AdapterLayout
from penstock.engine.adapters.norms import Norm, NormBank, Norms
from penstock.engine.adapters.runtime import AdaptedModel
from penstock.engine.adapters.vectors import VectorBank, Vectors
from penstock.engine.backends.interface import (
    FP8,
    INT8,
    ActivationOps,
    DeviceAccess,
    DeviceMemory,
    NativeLibrary,
    Ops,
    StepDefaults,
    StepLimits,
)
from penstock.engine.config import EngineConfig
from penstock.engine.kv.cache import KVCache
from penstock.engine.kv.mover import BlockMover
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.layers.experts import ExpertMlp, SharedAndRouted
from penstock.engine.models.layers.factory import LayerFactory
from penstock.engine.models.layers.feed_forward import FeedForward, GatedMlp
from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.models.weights import Quantizer, Weights
from penstock.engine.runner.executor import Executor
from penstock.engine.runner.follower import Follower, FollowerResources
from penstock.engine.runner.resources import RunnerResources
from penstock.errors import ConfigError


class InputObserver(Protocol):
    """Sees the inputs of one linear during calibration."""

    @property
    def linear(self) -> Linear: ...

    squares: Tensor
    """Float32 [in]: of the inputs seen so far, summed."""

    def see(self, x: Tensor) -> None:
        """Note the inputs [T, in] of a call."""
        ...

    def finish(self) -> None:
        """Adapt the linear to what was seen, and stop observing."""
        ...


class PeerGroup(Protocol):
    """Collectives between ranks that read and write each other's device memory: no host takes part, so they can be
    captured with the steps. All ranks of the group make the same calls in the same order, on one stream."""

    def takes(self, x: Any) -> bool:
        """Whether it is the fastest way for such a tensor, or the only one."""
        ...

    def sum(self, x: Any) -> Tensor:
        """The sum of every rank's `x`, made in the order of ranks: the same numbers in any batch. May overwrite `x`."""
        ...

    def add_rms_norm(
        self, ops: object, x: Any, residual: Tensor, weight: Tensor | None, eps: float, x_weight: Tensor | None
    ) -> Any:
        """`ops.add_rms_norm` of the sum of every rank's `x`, in one launch; None where there is no such kernel."""
        ...

    def gather(self, x: Tensor, outputs: int) -> Tensor:
        """Every rank's `x` [T, n] side by side, the first `outputs` columns of that."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """The first rank's `x`, written over those of all others."""
        ...


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """How the decoder's linears are made and fed."""

    quantize: Quantizer | None = None
    inner: ActivationOps | None = None
    fused_up_to: int = 0


class Backend(DeviceAccess, LayerFactory, ABC):
    """One device as one engine uses it."""

    product: str = ""
    """The device's name as its driver knows it; empty for a CPU."""
    ops: Ops
    memory: DeviceMemory
    defaults: StepDefaults
    overlaps: bool
    """Whether the next step is scheduled while one runs."""
    calibrates: bool
    """Whether a prompt is run through a decoder after loading to adapt what is kept in int8."""
    compiles: bool
    """Whether kernels are compiled at start (`compile`)."""
    offloads: bool
    """Whether a sleeping engine's weights move to host memory; otherwise they are loaded again."""
    exchange_step_bytes: int
    """KV blocks from other engines taken in between two steps, at most, in bytes."""
    restore_step_bytes: int | None
    """KV blocks that one step copies back from the host, at most, in bytes, so that no other sequence waits long for
    them. None: any number."""
    adapters_by_output: bool
    """See `AdapterLayout`."""
    invariant_adapters: bool = False
    """Whether adapters have batch-invariant kernels too (`deterministic`)."""
    attends_varlen: bool
    """Whether PyTorch has attention over packed texts of different lengths on the device."""
    native: NativeLibrary | None = None

    # Numbers and weights

    def kv_dtype(self, config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> torch.dtype:
        """Type of the KV cache."""
        if config.kv_dtype == "auto":
            return self._auto_kv_dtype(config, model, dtype)
        return {"full": dtype, "int8": INT8, "fp8": FP8}[config.kv_dtype]

    def attend_in_fp8(self, model: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype, longest_chunk: int) -> None:
        """`fp8_attention`, from now on; refused where there is no kernel for it, or no step has enough tokens of a
        prompt: `longest_chunk` is the most."""
        raise ConfigError(
            "fp8_attention: true needs a GPU of compute capability 9 (H100, H200 and the like) and triton with Gluon; "
            "remove it"
        )

    def _auto_kv_dtype(self, config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> torch.dtype:
        return dtype

    @abstractmethod
    def plan_weights(self, config: EngineConfig, dtype: torch.dtype, weights: Weights) -> WeightPlan:
        """Choose the form of the weights; one that is not available here is refused. Few-bit checkpoints stay as they
        are. In deterministic mode all linears are batch-invariant."""

    def as_head(self, linear: Linear) -> Linear:
        return linear

    def experts(self, stored: Callable[[], ExpertMlp], widened: Callable[[], ExpertMlp]) -> FeedForward:
        return stored()

    def with_shared(self, routed: FeedForward, shared: GatedMlp, gate: Linear | None) -> FeedForward:
        return SharedAndRouted(routed, shared, gate, self.ops.sigmoid)

    def observable(self) -> Backend:
        """A backend of the same device under which every linear is called by itself, so that its inputs can be
        observed: this one, or a plainer one."""
        return self

    def input_observers(self, linears: Iterable[Linear]) -> list[InputObserver]:
        """Observers of those linears that calibration can improve."""
        return []

    def int8_linear(self, weight: Tensor, bias: Tensor) -> Callable[[Tensor], Tensor] | None:
        """A linear with weights and activations in int8; None where its shape does not allow that.

        Raises `ConfigError` where there are no such kernels."""
        raise ConfigError("an encoder with `weights: int8` needs the native CPU kernels, and float32 beside them")

    # Adapters

    @abstractmethod
    def lora_kernel(self, layout: AdapterLayout, slots: int, rank: int, dtype: torch.dtype) -> LoraKernel:
        """Holds up to `slots` adapters of up to `rank`, in `dtype`."""

    def vector_bank(self, layout: AdapterLayout, slots: int, *, reserved: bool) -> Vectors:
        """Holds what the adapters of `slots` slots do to single outputs. `reserved`: in memory that is taken now, where
        the device has its own, so that captured steps find it."""
        return VectorBank(slots, self.device)

    def norm_bank(self, norms: Sequence[tuple[Norm, Tensor]], slots: int, *, reserved: bool) -> Norms:
        """Holds the norms that they replace, of those that `norms_of` knows; `reserved`: likewise."""
        return NormBank(slots, norms, self.device)

    def adapter_dtype(
        self, decoder: Decoder, layout: AdapterLayout, dtype: torch.dtype, anywhere: Callable[[bool], bool]
    ) -> torch.dtype:
        """What adapters are kept in, beside activations of `dtype`; the same on every rank. `anywhere`: whether
        something holds on one of them, asked on all."""
        return dtype

    # Running

    @abstractmethod
    def executor(self, resources: RunnerResources) -> Executor:
        """The fastest executor of a model on this device alone."""

    def follower(self, resources: FollowerResources) -> Follower:
        """For a rank whose groups need no host; see `Followers`."""
        raise NotImplementedError("this backend captures no steps")

    def compile(
        self,
        decoder: Decoder,
        kv_dtype: torch.dtype,
        limits: StepLimits,
        adapters: AdaptedModel | None,
        done: Collection[object] = (),
        wanted: Callable[[], bool] = lambda: True,
    ) -> Collection[object]:
        """Compile every kernel that steps may launch, on whatever thread. Returns the kinds of layers there were;
        `done`: kinds that need no more. `wanted`: asked before each kernel; once it says no, none is begun."""
        return ()

    def long_context_bytes(self, decoder: Decoder, kv: KVCache) -> int:
        """What a step over a long context takes beside what one over a short context needs, at most."""
        return 0

    def graph_bytes(self, decoder: Decoder, limits: StepLimits) -> int:
        """What captured steps keep in the end, where steps are captured."""
        return 0

    def synchronize(self) -> None:
        """Block until the device has done everything launched so far."""

    # Memory and other devices

    @abstractmethod
    def block_mover(self, kv: KVCache, num_slots: int) -> BlockMover:
        """Copies KV blocks to and from `num_slots` slots of host memory."""

    @abstractmethod
    def process_group(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        """A `torch.distributed` group for collectives between ranks on such devices."""

    def peer_group(self, store: Any, rank: int, size: int, timeout: timedelta) -> PeerGroup | None:
        """Collectives over shared device memory; None where there is none. `store` is not that of `process_group`."""
        return None
