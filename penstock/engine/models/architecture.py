"""What a model file gives the builder: how a layer is composed from a checkpoint's tensors, and the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.engine.backends.interface import ActivationOps
from penstock.engine.models.decoder import Decoder, DecoderLayer
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.models.weights import WeightReader


@dataclass(frozen=True, slots=True)
class LayerContext:
    """Everything that one layer is composed of."""

    read: WeightReader
    config: ModelConfig
    names: TensorNames
    index: int
    prefix: str
    """Of the layer's tensor names, such as `model.layers.0.`."""
    cos_sin: Tensor
    """The layer's rotary table."""
    inner: ActivationOps
    """Norms and activations inside the layer: the backend's own, or those that hand FP8 to FP8 linears."""
    fp8_cache: bool

    def beginning(self, layer: int) -> str:
        """What `prefix` is of another layer."""
        return f"{self.prefix.removesuffix(f'{self.index}.')}{layer}."


@dataclass(frozen=True, slots=True)
class Architecture:
    """How families of one kind are built and run."""

    decoder: type[Decoder]
    compose_layer: Callable[[LayerContext], DecoderLayer]
    further: Callable[[WeightReader, ModelConfig, str], Mapping[str, Any]] | None = None
    """What the decoder has beside embedding, layers and head, given what names begin with."""
