"""Adaption prompts (LLaMA-Adapter): layers in which queries attend to learned tokens too, apart from all others.

What a query sees there, by a softmax of its own, is multiplied by a gate and added to what it sees in the sequence,
before the output projection. Keys and values are what the layer's own projections make of the learned tokens, without
rotation: they are computed when an adapter is read, the gate inside of the values. The library's layers project the
addition by itself, so that a bias of that projection counts twice. Steps with such adapters are launched from the host.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.engine.adapters.base_tensors import BaseTensors
from penstock.engine.adapters.layout import AdapterCut, rows_of
from penstock.engine.adapters.spec import CONFIG
from penstock.engine.adapters.stored_keys import Storing, StoringOps, with_storing_ops
from penstock.engine.adapters.tiles import grouped
from penstock.engine.backends.interface import AttentionBatch, HeadLayout, KeySmoothing
from penstock.engine.models.decoder import Decoder
from penstock.errors import CheckpointError

_KEY = re.compile(r"(?:.*\.)?(?:layers|h|blocks)\.(\d+)\.([\w.]+)\.adaption_(prompt|gate)")
_FAMILIES = ("llama", "mistral")
"""Those that PEFT knows, GPT-2 aside, which runs through transformers."""
_AT_ONCE = 1 << 24
"""Numbers of queries and scores, about: what a step needs besides must not grow with adapters, since no cache was made
smaller for it."""


@dataclass(frozen=True, slots=True)
class AdaptionPrompts:
    """Those of one adapter, of this process's layers and heads."""

    of: Mapping[int, Tensor]
    """By layer, float32 [2, tokens, key heads * head size]: keys, and values times the gate."""

    def to(self, device: torch.device) -> AdaptionPrompts:
        return AdaptionPrompts({layer: both.to(device, non_blocking=True) for layer, both in self.of.items()})


@dataclass(slots=True)
class AdaptionTensors:
    """Collects the tensors of one file, then reads them."""

    file: str
    cut: AdapterCut
    base: BaseTensors | None
    _keys: dict[int, dict[str, str]] = field(default_factory=dict)

    def take(self, key: str) -> bool:
        """Whether a tensor is one of these."""
        found = _KEY.fullmatch(key)
        if found is not None:
            self._keys.setdefault(int(found[1]), {})[found[3]] = key
        return found is not None

    @property
    def any(self) -> bool:
        return bool(self._keys)

    def read(
        self,
        settings: Mapping[str, int],
        tensors: Any,
        hashed: Callable[[str, Tensor], None],
        add: Callable[[int, str, Tensor], None],
    ) -> AdaptionPrompts | None:
        """This process's part of them; None: the adapter has none on any rank. `settings`: what the configuration says
        of tokens and layers. `add`: takes what is added to the outputs of a layer's module."""
        if not self._keys:
            return None
        whole = self.cut.whole
        index = next((number for number, site in enumerate(whole.sites) if site.attribute == "qkv"), None)
        if index is None or self.base is None or self.base.family not in _FAMILIES:
            family = "this model" if self.base is None else f"{self.base.family} models"
            raise CheckpointError(
                f"{CONFIG}: adaption prompts are those of Llama and Mistral models; PEFT has none for {family}"
            )
        layers = sorted(self._keys)
        wanted = list(range(whole.layers - settings["adapter_layers"], whole.layers))
        if layers != wanted:
            raise CheckpointError(f"{self.file} has adaption prompts of layers {layers}, and {CONFIG} says {wanted}")
        first, last = self.cut.layers
        found: dict[int, Tensor] = {}
        output = next(site.modules for site in whole.sites if site.attribute == "output")
        for layer, keys in sorted(self._keys.items()):
            if len(keys) != 2:
                raise CheckpointError(
                    f"{self.file}: layer {layer} has no adaption_{'gate' if 'prompt' in keys else 'prompt'}"
                )
            prompt, gate = tensors.get_tensor(keys["prompt"]), tensors.get_tensor(keys["gate"]).reshape(-1)
            if tuple(prompt.shape) != (1, settings["adapter_len"], whole.sites[index].inputs) or gate.numel() != 1:
                raise CheckpointError(
                    f"{self.file}: the adaption prompt of layer {layer} is {tuple(prompt.shape)}; here it must "
                    f"be (1, {settings['adapter_len']}, {whole.sites[index].inputs}), with one number as its gate"
                )
            hashed(keys["prompt"], prompt)
            hashed(keys["gate"], gate)
            bias = self.base.of_layer(layer, output, "bias")
            if bias is not None:
                add(layer, output[0], bias.float())
            if not first <= layer < last:
                continue
            sides = [self._made(layer, index, part, prompt[0].float()) for part in (1, 2)]
            found[layer - first] = torch.stack((sides[0], sides[1] * gate.float())).contiguous()
            if not bool(found[layer - first].isfinite().all()):
                raise CheckpointError(f"{self.file}: the adaption prompt of layer {layer} is not finite")
        return AdaptionPrompts(found)

    def _made(self, layer: int, index: int, part: int, prompt: Tensor) -> Tensor:
        """Keys (1) or values (2) of this process's heads: [tokens, numbers]."""
        assert self.base is not None
        module, rows = self.cut.whole.sites[index].modules[part], self.cut.outputs[index][part]
        weight, bias = (self.base.of_layer(layer, (module,), kind) for kind in ("weight", "bias"))
        if weight is None:
            raise CheckpointError(
                f"the checkpoint has no {module} in layer {layer}, which adaption prompts are read by"
            )
        made = prompt @ rows_of(weight, rows).float().t()
        return made if bias is None else made + rows_of(bias, rows).float()


class AdaptionBank:
    """Those of all slots. `begin` is that of `LoraKernel`."""

    def __init__(self, slots: int, device: torch.device, *, one_by_one: bool = False) -> None:
        """`one_by_one`: what a token gets does not depend on the others of its step."""
        self._held: list[AdaptionPrompts | None] = [None] * slots
        self._device = device
        self._one_by_one = one_by_one
        self._groups: list[tuple[AdaptionPrompts, Tensor | None]] = []

    def put(self, slot: int, prompts: AdaptionPrompts | None) -> None:
        """Bring those of an adapter into a slot. They are small: slots reserve nothing for them."""
        self._held[slot] = None if prompts is None else prompts.to(self._device)

    def begin(self, slots: np.ndarray) -> None:
        self._groups = grouped(self._held, slots, self._device)

    def clear(self) -> None:
        """The coming step is captured: it has none."""
        self._groups = []

    def add(self, q: Tensor, y: Tensor, heads: HeadLayout, layer: int, smoothing: KeySmoothing | None) -> None:
        """To what queries `q` [T, heads, head size] have seen, in place. `smoothing`: what they were multiplied by."""
        for prompts, tokens in self._groups:
            both = prompts.of.get(layer)
            if both is None:
                continue
            keys, values = both.view(2, both.shape[1], heads.kv_heads, heads.head_dim)
            if smoothing is not None:
                keys = keys / smoothing.scale
            rows = torch.arange(len(q), device=q.device) if tokens is None else tokens
            at_once = 1 if self._one_by_one else max(1, _AT_ONCE // (heads.heads * (heads.head_dim + both.shape[1])))
            for some in torch.split(rows, at_once):
                own = q[some].float().view(len(some), heads.kv_heads, -1, heads.head_dim)
                scores = torch.einsum("tkgd,pkd->tkgp", own, keys) / math.sqrt(heads.head_dim)
                seen = torch.einsum("tkgp,pkd->tkgd", scores.softmax(-1), values)
                y[some] = (y[some].float() + seen.reshape(len(some), -1)).to(y.dtype)


class AdaptionOps(StoringOps):
    """Adds what queries see of the learned tokens behind attention."""

    def __init__(self, base: Any, bank: AdaptionBank, layer: int) -> None:
        super().__init__(base)
        self._bank = bank
        self._layer = layer
        self._smoothing: KeySmoothing | None = None

    def _stored(self, call: Storing) -> Tensor:
        self._smoothing = call.key_smoothing  # of the queries that `attention` gets next
        return self._base_stores(call)

    def attention(self, q: Tensor, layout: HeadLayout, batch: AttentionBatch, *rest: Any) -> Tensor:
        y: Tensor = self._base.attention(q, layout, batch, *rest)
        self._bank.add(q, y, layout, self._layer, self._smoothing)
        return y


def with_adaption_prompts(decoder: Decoder, bank: AdaptionBank) -> Decoder:
    """`decoder` with the adaption prompts that the step's adapters have."""
    return with_storing_ops(decoder, lambda ops, layer: AdaptionOps(ops, bank, layer))
