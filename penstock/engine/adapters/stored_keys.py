"""What stands before the operation that stores a step's keys and values, for adapters that change what is stored."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from penstock.engine.backends.interface import AttentionBatch, HeadLayout, KeySmoothing, KVScales
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.layers.attention import Attention
from penstock.engine.models.layers.forwarder import Forwarder
from penstock.engine.models.layers.side_by_side import SideBySide


class Storing(NamedTuple):
    """The arguments of one call of `AttentionOps.rope_and_cache`."""

    qkv: Tensor
    layout: HeadLayout
    cos_sin: Tensor
    batch: AttentionBatch
    k_cache: Tensor
    v_cache: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    kv_scales: KVScales | None = None
    key_smoothing: KeySmoothing | None = None


class StoringOps(Forwarder, ABC):
    """Operations of one layer; see `AttentionOps`."""

    def rope_and_cache(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._stored(Storing(*args, **kwargs))

    @abstractmethod
    def _stored(self, call: Storing) -> Tensor:
        """What `rope_and_cache` returns."""

    def _base_stores(self, call: Storing) -> Tensor:
        q: Tensor = self._base.rope_and_cache(*call)
        return q


def with_storing_ops(decoder: Decoder, make: Callable[[Any, int], StoringOps]) -> Decoder:
    """`decoder` with what `make` makes of the operations of its attention, and of the number of their layer."""

    def changed(number: int, mixer: Any) -> Any:
        if isinstance(mixer, SideBySide):
            return dataclasses.replace(mixer, attention=changed(number, mixer.attention))
        if not isinstance(mixer, Attention):
            return mixer
        return dataclasses.replace(mixer, attention_ops=make(mixer.attention_ops, number))

    layers = [
        dataclasses.replace(layer, mixer=changed(number, layer.mixer)) for number, layer in enumerate(decoder.layers)
    ]
    return dataclasses.replace(decoder, layers=layers)
