"""FP8 checkpoints as they are published.

A weight in float8 is stored with its scale: one number for the tensor, one per output row, or one per tile, whose
sides `quantization_config` gives; a tile at the edge of a matrix may be cut. Read as a plain tensor a weight is
dequantized in float32; `stored` gives the FP8 numbers themselves with one scale per row, where the checkpoint has that,
`grouped` with one per row and group of inputs, which every checkpoint in e4m3 has.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.engine.loading.quantization_keys import FP8, check_compressed, pair, whole_number
from penstock.errors import CheckpointError

SCALES = ("_scale", "_scale_inv")
"""What follows the name of a weight in that of its scale."""
_SUFFIXES = ("weight_scale", "weight_scale_inv", "input_scale", "activation_scale", "k_scale", "v_scale")
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_DEFAULT_TILE = [128, 128]

Tile = tuple[int, int]
"""Outputs and inputs that share a scale."""


class Fp8Checkpoint:
    """A checkpoint whose linears are FP8, under the names of the unquantized one."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.config: dict[str, Any] = {k: v for k, v in inner.config.items() if k != "quantization_config"}
        self._names = set(inner.names())
        self._tile = tile_of(inner.config)

    @property
    def folder(self) -> Path | None:
        """Of its files; None where it has none."""
        return getattr(self.inner, "folder", None)

    def names(self) -> Collection[str]:
        return {name for name in self._names if not name.endswith(_SUFFIXES)}

    @property
    def tiled(self) -> bool:
        """Whether tiles of weights share a scale, as the configuration says."""
        return self._tile is not None

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        weight: Tensor = self.inner.tensor(name, device)
        if not self._is_float8(name, weight):
            return weight
        scale = self._group_scales(name, weight)
        out, groups = scale.shape
        return (weight.float().view(out, groups, -1) * scale.unsqueeze(-1)).view(weight.shape)

    def stored(self, name: str, device: str | torch.device = "cpu") -> tuple[Tensor, Tensor] | None:
        """e4m3 weight [out, in] and float32 scale [out], or None when the checkpoint has no scale per row."""
        if self._tile is not None and f"{name}_scale_inv" in self._names:
            return None  # known without reading the weight
        found = self.grouped(name, device)
        return None if found is None or found[1].shape[1] != 1 else (found[0], found[1][:, 0].contiguous())

    def grouped(self, name: str, device: str | torch.device = "cpu") -> tuple[Tensor, Tensor] | None:
        """e4m3 weight [out, in] and float32 scale [out, groups] of inputs; None when it is not e4m3."""
        weight: Tensor = self.inner.tensor(name, device)
        if not self._is_float8(name, weight) or weight.dtype != torch.float8_e4m3fn:
            return None
        return weight, self._group_scales(name, weight)

    def kv_scale(self, attention: str) -> tuple[float, float]:
        """Scales of a layer's cached keys and values; 1 where the checkpoint has none."""
        return kv_scale(self.inner, self._names, attention)

    def _is_float8(self, name: str, weight: Tensor) -> bool:
        if weight.dtype in _FLOAT8:
            return True
        if any(f"{name}{suffix}" in self._names for suffix in SCALES):
            raise CheckpointError(f"{name!r} has a scale but is {weight.dtype}, not FP8; the checkpoint is damaged")
        return False

    def _group_scales(self, name: str, weight: Tensor) -> Tensor:
        """float32 [out, groups]: a scale per row and group of inputs; all groups have one size."""
        found = [f"{name}{suffix}" for suffix in SCALES if f"{name}{suffix}" in self._names]
        if len(found) != 1 or weight.dim() != 2:
            what = "no scale" if not found else "more than one scale" if len(found) > 1 else f"shape {weight.shape}"
            raise CheckpointError(f"{name!r} is FP8 but has {what}; the checkpoint is incomplete or damaged")
        scale: Tensor = self.inner.tensor(found[0], weight.device)
        if scale.dtype == torch.uint8:  # bare exponents
            scale = (scale.float() - 127).exp2()
        elif not scale.is_floating_point():
            raise CheckpointError(f"{found[0]!r} is {scale.dtype}; scales must be floating-point numbers")
        scale = scale.float()
        out, inputs = weight.shape
        if scale.numel() == 1:
            return scale.reshape(1, 1).expand(out, 1)
        by_row = tuple(scale.shape) in ((out,), (out, 1))
        if self._tile is None or (by_row and found[0].endswith("_scale")):
            if not by_row:
                raise CheckpointError(
                    f"{found[0]!r} has shape {tuple(scale.shape)} for {out} rows, and the configuration names no tiles"
                )
            return scale.reshape(out, 1)
        rows, columns = self._tile
        if tuple(scale.shape) != (-(-out // rows), -(-inputs // columns)):
            raise CheckpointError(
                f"{found[0]!r} has shape {tuple(scale.shape)}, which does not fit a weight of {(out, inputs)} in tiles "
                f"of {self._tile}"
            )
        scale = scale[torch.arange(out, device=scale.device) // rows]
        if scale.shape[1] == 1:
            return scale
        # A tile that the edge cuts makes groups of different sizes: they are cut into equal ones.
        size = math.gcd(columns, inputs)
        return scale[:, torch.arange(0, inputs, size, device=scale.device) // columns]


def kv_scale(inner: Any, names: Collection[str], attention: str) -> tuple[float, float]:
    """Scales of a layer's cached keys and values; 1 where the checkpoint has none."""
    found = []
    for kind in ("k", "v"):
        places = (f"{attention}{kind}_scale", f"{attention}{kind}_proj.{kind}_scale")
        name = next((n for n in places if n in names), None)
        found.append(float(inner.tensor(name).float().max()) if name else 1.0)
    return found[0], found[1]


def tile_of(config: dict[str, Any]) -> Tile | None:
    """What shares a scale, as the configuration says; None: a row or a whole matrix. Checks every key."""
    settings = config.get("quantization_config") or {}
    if settings.get("quant_method") != "compressed-tensors":
        FP8.check(settings, "quantization_config")
        sides = settings.get("weight_block_size", _DEFAULT_TILE)
        return None if sides is None else pair(sides, "weight_block_size")
    tiles = set()
    for weights in check_compressed(settings):
        size = whole_number(weights, "group_size", -1)
        strategy = weights.get("strategy") or ("group" if size > 0 else "channel")
        if strategy == "block":
            tiles.add(pair(weights.get("block_structure"), "block_structure"))
        elif strategy == "group" and size > 0:
            tiles.add((1, size))
        elif strategy in ("tensor", "channel"):
            tiles.add((0, 0))
        else:
            raise CheckpointError(
                f"FP8 weights with strategy {strategy!r} are not supported; supported: tensor, channel, group, block"
            )
    if len(tiles) > 1:
        raise CheckpointError("config_groups with different layouts of FP8 scales are not supported")
    found = tiles.pop()
    return None if found == (0, 0) else found
