"""Rotary position tables: cosines and sines of every position, scaled as the checkpoint asks.

Operations are in the order of the reference implementation: at position 131,071 one rounding more in a frequency is an
error of 1e-5 in an angle.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from penstock.engine.models.attention_config import QueryGrowth
from penstock.engine.models.rope import RopeConfig
from penstock.errors import CheckpointError


def cos_sin_table(
    rope: RopeConfig, head_dim: int, positions: int, device: torch.device, factors: Tensor | None = None
) -> Tensor:
    """float32 [positions, rotated dimensions]: cosines in the first half of each row, sines in the second. `factors`:
    of every frequency."""
    if not head_dim:
        return torch.empty((positions, 0), device=device)
    if rope.kind == "none":  # a rotation by nothing, of the least that the kernels rotate
        return torch.tensor([[1.0, 0.0]], device=device).repeat(positions, 1)
    if rope.kind == "still":
        return torch.tensor([[1.0, 0.0]], device=device).repeat_interleave(head_dim // 2, 1).repeat(positions, 1)
    try:
        if rope.kind == "proportional":
            frequencies, scale = _proportional(rope, head_dim), 1.0
        else:
            frequencies, scale = _frequencies(rope, int(head_dim * rope.rotated), positions)
    except ArithmeticError as error:
        raise CheckpointError(f"the rope parameters of kind {rope.kind} have no frequencies: {error}") from None
    if factors is not None and not factors.is_meta:
        frequencies = frequencies * factors.cpu()
    angles = torch.arange(positions, dtype=torch.float32).unsqueeze(1) * frequencies
    return (torch.cat((angles.cos(), angles.sin()), dim=1) * scale).to(device)


def query_scales(growth: QueryGrowth, positions: int, device: torch.device) -> Tensor:
    """float32 [positions]; see `QueryGrowth`."""
    periods = ((torch.arange(positions).float() + growth.offset) / growth.period).floor()
    return (periods.log1p() * growth.strength + 1.0).to(device)


def log_positions(positions: int, device: torch.device) -> Tensor:
    """float32 [positions]; see `HeadScales`."""
    return (torch.arange(positions) + 1).float().log().to(device)


def _frequencies(rope: RopeConfig, dim: int, positions: int) -> tuple[Tensor, float]:
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    wavelengths = rope.theta**exponents
    base = 1.0 / wavelengths
    if rope.kind == "linear":
        return base / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, base), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, wavelengths, dim)
    if rope.kind == "longrope":
        return _longrope(rope, wavelengths, positions)
    return base, 1.0


def _proportional(rope: RopeConfig, dim: int) -> Tensor:
    """Pairs are half of the head apart, as if all were rotated; the last of them stand still."""
    turning = int(rope.rotated * dim // 2)
    exponents = torch.arange(0, 2 * turning, 2, dtype=torch.int64).float() / dim
    return torch.cat((1.0 / (rope.theta**exponents), torch.zeros(dim // 2 - turning))) / rope.factor


def _llama3(rope: RopeConfig, base: Tensor) -> Tensor:
    """Keep high frequencies, divide low ones by `factor`, blend in between."""
    turns = rope.original_max_positions * base / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * base / rope.factor + blend * base
    scaled = torch.where(turns < rope.low_freq_factor, base / rope.factor, blended)
    return torch.where(turns > rope.high_freq_factor, base, scaled)


def _yarn(rope: RopeConfig, wavelengths: Tensor, dim: int) -> tuple[Tensor, float]:
    """Blend between the dimensions that rotate `beta_fast` and `beta_slow` times within the trained window."""

    def dimension(turns: float) -> float:
        return dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / ((high - low) or 1e-3)).clamp(0, 1)
    keep = 1 - ramp
    frequencies = wavelengths.mul(rope.factor).reciprocal() * (1 - keep) + wavelengths.reciprocal() * keep

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    scale = rope.attention_factor
    if scale is None and rope.mscale and rope.mscale_all_dim:
        scale = magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return frequencies, magnitude(1.0) if scale is None else scale


def _longrope(rope: RopeConfig, wavelengths: Tensor, positions: int) -> tuple[Tensor, float]:
    """Divide each frequency by its own factor: the long ones in an engine whose contexts may pass the original length.

    One table for all contexts, chosen when the engine starts: were it chosen by each sequence's length, keys cached
    before a sequence outgrew the original length would no longer fit those after.
    """
    factors = rope.long_factor if positions > rope.original_max_positions else rope.short_factor
    if len(factors) != len(wavelengths):
        raise CheckpointError(f"longrope has {len(factors)} factors for {len(wavelengths)} frequencies")
    scale = rope.attention_factor
    if scale is None:
        growth = math.log(rope.factor) / math.log(rope.original_max_positions) if rope.factor > 1 else 0.0
        scale = math.sqrt(1 + growth)
    return 1.0 / (torch.tensor(factors) * wavelengths), scale
