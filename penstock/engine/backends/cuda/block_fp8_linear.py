"""FP8 weights in tiles on CUDA: taken over from a checkpoint as stored, scales and all."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.backends.cuda.kernels import block_fp8
from penstock.engine.loading.fp8 import Fp8Checkpoint
from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.weights import Weights, of_ends

LEAST_INPUTS = 16
"""That the kernels take to share a scale."""
_LONGEST_RUN = 128


class BlockFp8Linear:
    """Weights [out, in] in e4m3, with a scale for every tile of outputs and inputs."""

    pdl = False

    def __init__(self, weight: Tensor, scale: Tensor, tile: tuple[int, int], bias: Tensor | None) -> None:
        """`scale`: [out / tile, in / tile], float32."""
        self.weight = weight
        self.scale = scale
        self.tile = tile
        self.bias = bias
        self.weight_bytes = weight.numel() + scale.numel() * scale.element_size()

    @classmethod
    def of_rows(cls, weight: Tensor, scale: Tensor, bias: Tensor | None) -> BlockFp8Linear:
        """From a scale for every row and group of inputs, [out, groups]: neighbouring rows that share theirs have one
        again."""
        out, groups = scale.shape
        run = _LONGEST_RUN
        while run > 1 and (out % run or not bool((scale.view(-1, run, groups) == scale[::run].unsqueeze(1)).all())):
            run //= 2
        return cls(weight, scale[::run].contiguous(), (run, weight.shape[1] // groups), bias)

    def __call__(self, x: Tensor) -> Tensor:
        return block_fp8.linear(x, self.weight, self.scale, self.tile, self.bias, pdl=self.pdl)


class BlockFp8Quantizer:
    """See `Quantizer`. What the checkpoint has in other forms stays dense."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, weights: Weights, names: dict[str, int], inputs: int, bias: Tensor | None) -> Linear | None:
        if not isinstance(weights, Fp8Checkpoint) or of_ends(names):
            return None
        parts = [part for part in (weights.grouped(name, self.device) for name in names) if part is not None]
        if len(parts) != len(names) or len({scale.shape[1] for _, scale in parts}) > 1:
            return None
        if inputs // parts[0][1].shape[1] % LEAST_INPUTS:
            return None
        weight = torch.cat([part.view(torch.uint8) for part, _ in parts]).view(parts[0][0].dtype)
        return BlockFp8Linear.of_rows(weight, torch.cat([scale for _, scale in parts]), bias)
