"""FP8 checkpoints whose experts are in four bits (DeepSeek V4): two e2m1 numbers in a byte, and an exponent for every
32 inputs, which is MXFP4. `expert_dtype` says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.engine.loading.fp8 import Fp8Checkpoint
from penstock.engine.loading.mxfp4 import BLOCK, Mxfp4
from penstock.errors import CheckpointError

_BYTES = (torch.int8, torch.uint8)
_EXPERTS, _SCALE = ".experts.", "_scale_inv"


def expert_dtype(config: Mapping[str, Any]) -> str:
    """Of an FP8 checkpoint; CheckpointError for one that cannot be read. Where both places say it, the inner one
    counts, as in the reference."""
    inner = config.get("quantization_config") or {}
    found = inner["expert_dtype"] if "expert_dtype" in inner else config.get("expert_dtype")
    if found not in ("fp8", "fp4", None):
        raise CheckpointError(f"expert_dtype is {found!r:.80}; supported: 'fp8', 'fp4'")
    return found or "fp8"


class Fp4ExpertsCheckpoint(Fp8Checkpoint):
    """See the top of the file. All other linears are FP8."""

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        packed = self.mxfp4(name, device)
        return super().tensor(name, device) if packed is None else packed.dense()

    def stored(self, name: str, device: str | torch.device = "cpu") -> tuple[Tensor, Tensor] | None:
        return None if self._is_packed(name) else super().stored(name, device)

    def grouped(self, name: str, device: str | torch.device = "cpu") -> tuple[Tensor, Tensor] | None:
        return None if self._is_packed(name) else super().grouped(name, device)

    def mxfp4(self, name: str, device: str | torch.device = "cpu") -> Mxfp4 | None:
        """The matrix as stored; None where it is not in MXFP4."""
        if not self._is_packed(name):
            return None
        blocks, scales = self.inner.tensor(name, device), self.inner.tensor(f"{name}{_SCALE}", device)
        exponents = scales.dtype in (torch.float8_e8m0fnu, torch.uint8)
        fits = blocks.dim() == 2 and tuple(scales.shape) == (len(blocks), 2 * blocks.shape[1] // BLOCK)
        if blocks.dtype not in _BYTES or not exponents or not fits:
            raise CheckpointError(
                f"{name!r} is {blocks.dtype} {tuple(blocks.shape)} with scales {scales.dtype} {tuple(scales.shape)}, "
                f"not e2m1 in blocks of {BLOCK}, as expert_dtype says"
            )
        return Mxfp4(blocks.view(torch.uint8), scales.view(torch.uint8))

    def _is_packed(self, name: str) -> bool:
        return _EXPERTS in name and f"{name}{_SCALE}" in self._names
