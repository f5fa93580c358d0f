"""Decoders of multimodal checkpoints whose experts are stored otherwise than in the family that they belong to, under
the family's names.

`TextExperts` (ERNIE 4.5 VL): experts of text come before those of images, routers are stored as [hidden, experts], and
the scores' corrections of both kinds are one tensor. `EitherWayStacks` (Qwen3-VL-MoE): stacks of experts are [experts,
in, out] or [experts, out, in]; the reference tells them apart by their shape, and takes the second where both fit.
Scales of such stacks in FP8 lie as the matrices do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.engine.loading.expert_stacks import stacks_among, with_stacks
from penstock.engine.loading.fp8 import SCALES
from penstock.engine.models.families import TEXT_TYPES, decoder_type
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.engine.models.wrappers import decoder_keys
from penstock.errors import CheckpointError

_PARTS = ("gate_up_proj", "down_proj")
_ROUTER, _CORRECTION = ".mlp.gate.weight", ".moe_statics.e_score_correction_bias"
_OF_IMAGES = ".mlp.gate.weight_1"


class TextExperts:
    """See the top of the file. Other tensors are those of the inner checkpoint."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.config: dict[str, Any] = inner.config
        self._names = {name for name in inner.names() if not name.endswith(_OF_IMAGES)}

    def names(self) -> Collection[str]:
        return self._names

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        found: Tensor = self.inner.tensor(name, device)
        if name.endswith(_ROUTER):
            return found.t().contiguous()
        if not name.endswith(_CORRECTION):
            return found
        if found.dim() != 2 or len(found) != 2:
            raise CheckpointError(
                f"tensor {name!r} has shape {tuple(found.shape)}, not one row for text, one for images"
            )
        return found[:1]


class EitherWayStacks:
    """See the top of the file."""

    def __init__(self, inner: Any, keys: Mapping[str, Any]) -> None:
        self.inner = inner
        self.config: dict[str, Any] = inner.config
        widths = (keys.get("hidden_size"), keys.get("moe_intermediate_size"))
        self._ends = {f".experts.{part}": width for part, width in zip(_PARTS, widths, strict=True)}
        """How wide the last axis of each stack is, where it has that of inputs."""

    def names(self) -> Collection[str]:
        names: Collection[str] = self.inner.names()
        return names

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        found: Tensor = self.inner.tensor(name, device)
        stack = next((name.removesuffix(suffix) for suffix in SCALES if name.endswith(suffix)), name)
        width = next((width for end, width in self._ends.items() if stack.endswith(end)), None)
        if width is None or found.dim() != 3:
            return found
        weights = found if stack == name else self.inner.tensor(stack)
        return found if weights.shape[-1] == width else found.transpose(1, 2)


def as_family(checkpoint: Any, names: TensorNames) -> Any:
    """`checkpoint` with its experts under the names of a family's, `names`."""
    own = TEXT_TYPES.get(decoder_type(checkpoint.config))
    gate_up, down = (f"{names.moe}experts.{part}" for part in _PARTS)
    stacked = replace(names, expert_stacks=(gate_up, down))
    if own is not None and own.text_experts:
        checkpoint = TextExperts(checkpoint)
    if own is not None and own.stacked_experts:
        checkpoint = EitherWayStacks(checkpoint, decoder_keys(checkpoint.config))
    # The reference takes stacks apart when it writes a decoder alone, but not of every decoder that is in a wrapper.
    alike = names.expert_stacks is None and not names.stacked_experts and stacks_among(checkpoint.names(), stacked)
    return with_stacks(checkpoint, stacked if alike else names)
