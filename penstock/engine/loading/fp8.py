"""FP8 checkpoints as they are published.

A weight in float8_e4m3fn is stored with its scale: one number for the tensor or one per output row (`weight_scale`), or
one per tile of 128 x 128 (`weight_scale_inv`). Read as a plain tensor a weight is dequantized; `stored`
gives the FP8 numbers themselves with one scale per row, where the checkpoint has that, `grouped` with one per row and
group of inputs, which every checkpoint has.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CheckpointError

_SUFFIXES = ("weight_scale", "weight_scale_inv", "input_scale", "k_scale", "v_scale")


class Fp8Checkpoint:
    """A checkpoint whose linears are FP8, under the names of the unquantized one."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.config: dict[str, Any] = {k: v for k, v in inner.config.items() if k != "quantization_config"}
        self._names = set(inner.names())

    @property
    def scaled_by_rows(self) -> bool:
        """Whether every scale belongs to a row or a whole matrix, not to a tile of one."""
        return not any(name.endswith("weight_scale_inv") for name in self._names)

    def names(self) -> Collection[str]:
        return {name for name in self._names if not name.endswith(_SUFFIXES)}

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        weight: Tensor = self.inner.tensor(name, device)
        if weight.dtype != torch.float8_e4m3fn:
            return weight
        tiles = f"{name}_scale_inv"
        if tiles in self._names:
            scale = self.inner.tensor(tiles, device).float()
            side = -(-weight.shape[0] // scale.shape[0]), -(-weight.shape[1] // scale.shape[1])
            wide = scale.repeat_interleave(side[0], 0).repeat_interleave(side[1], 1)
            dense: Tensor = weight.float() * wide[: weight.shape[0], : weight.shape[1]]
            return dense.to(torch.bfloat16)
        return (weight.float() * self._row_scale(name, weight).unsqueeze(1)).to(torch.bfloat16)

    def stored(self, name: str, device: str | torch.device = "cpu") -> tuple[Tensor, Tensor] | None:
        """FP8 weight [out, in] and float32 scale [out], or None when the checkpoint has no scale per row."""
        if f"{name}_scale" not in self._names:
            return None
        weight: Tensor = self.inner.tensor(name, device)
        return weight, self._row_scale(name, weight)

    def grouped(self, name: str, device: str | torch.device = "cpu") -> tuple[Tensor, Tensor] | None:
        """FP8 weight [out, in] and float32 scale [out, groups] of inputs; None when it is not FP8, or the groups are
        not of one size."""
        weight: Tensor = self.inner.tensor(name, device)
        if weight.dtype != torch.float8_e4m3fn:
            return None
        tiles = f"{name}_scale_inv"
        if tiles not in self._names:
            return weight, self._row_scale(name, weight).unsqueeze(1)
        scale = self.inner.tensor(tiles, device).float()
        rows = -(-weight.shape[0] // scale.shape[0])
        if weight.shape[1] % scale.shape[1]:
            return None
        return weight, scale.repeat_interleave(rows, 0)[: weight.shape[0]]

    def kv_scale(self, attention: str) -> tuple[float, float]:
        """Scales of a layer's cached keys and values; 1 where the checkpoint has none."""
        found = []
        for kind in ("k", "v"):
            names = (f"{attention}{kind}_scale", f"{attention}{kind}_proj.{kind}_scale")
            name = next((n for n in names if n in self._names), None)
            found.append(float(self.inner.tensor(name).float().max()) if name else 1.0)
        return found[0], found[1]

    def _row_scale(self, name: str, weight: Tensor) -> Tensor:
        scale_name = f"{name}_scale"
        if scale_name not in self._names:
            raise CheckpointError(f"{name!r} is FP8 but the checkpoint has no scale for it; it is incomplete")
        scale: Tensor = self.inner.tensor(scale_name, weight.device).float().reshape(-1)
        if scale.numel() not in (1, weight.shape[0]):
            raise CheckpointError(f"{scale_name!r} has {scale.numel()} scales for {weight.shape[0]} rows")
        return scale.expand(weight.shape[0]).contiguous()
