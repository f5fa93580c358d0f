"""Rotary position tables: cosines and sines of every position, stretched as the checkpoint asks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from penstock.engine.models.config import RopeConfig


def cos_sin_table(rope: RopeConfig, head_dim: int, positions: int, device: torch.device) -> Tensor:
    """float32 [positions, head_dim]: cosines in the first half of each row, sines in the second."""
    frequencies, scale = _frequencies(rope, head_dim)
    angles = torch.arange(positions, dtype=torch.float32).unsqueeze(1) * frequencies
    return (torch.cat((angles.cos(), angles.sin()), dim=1) * scale).to(device)


def _frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    base = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return base / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, base), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, base, head_dim)
    return base, 1.0


def _llama3(rope: RopeConfig, base: Tensor) -> Tensor:
    """Keep high frequencies, divide low ones by `factor`, blend in between."""
    turns = rope.original_max_positions * base / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * base / rope.factor + blend * base
    stretched = torch.where(turns < rope.low_freq_factor, base / rope.factor, blended)
    return torch.where(turns > rope.high_freq_factor, base, stretched)


def _yarn(rope: RopeConfig, base: Tensor, head_dim: int) -> tuple[Tensor, float]:
    """Blend by dimension between the dimensions that turn `beta_fast` and `beta_slow` times in the trained window."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension(rope.beta_fast)), 0)
    high = min(math.ceil(dimension(rope.beta_slow)), head_dim - 1)
    ramp = ((torch.arange(head_dim // 2).float() - low) / max(high - low, 1e-3)).clamp(0, 1)
    frequencies = base / rope.factor * ramp + base * (1 - ramp)
    scale = rope.attention_factor
    if scale is None:
        scale = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    return frequencies, scale
