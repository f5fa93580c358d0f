"""What families with Mamba-2 layers have in common in their `config.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.engine.models.families.family import GGUFKeys, HFConfig, flag, integer, number
from penstock.engine.models.recurrence_config import MambaConfig
from penstock.errors import CheckpointError

if TYPE_CHECKING:
    from penstock.engine.models.architecture import Architecture

MAMBA_KEYS = frozenset({
    "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_expand",
    "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit",
})  # fmt: skip
"""`mamba_chunk_size` says how the reference cuts its sums, which changes nothing but their rounding."""
MAMBA_MATRICES = ("in_proj", "out_proj")
SSM_KEYS = frozenset({
    "ssm.conv_kernel", "ssm.group_count", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank",
})  # fmt: skip
"""Of GGUF files."""


def hybrid_architecture() -> Architecture:
    from penstock.engine.models.mamba_hybrid import MAMBA_HYBRID

    return MAMBA_HYBRID


def mamba_config(raw: HFConfig, layers: tuple[bool, ...], inner: int | None = None) -> MambaConfig:
    """From keys as Granite 4 and Bamba have them. `inner`: the width of the layers, where it is not the usual one."""
    inner = inner or integer(raw, "mamba_expand") * integer(raw, "hidden_size")
    heads = integer(raw, "mamba_n_heads")
    head_dim = inner // heads if raw["mamba_d_head"] == "auto" else integer(raw, "mamba_d_head")
    if heads * head_dim != inner:
        raise CheckpointError(
            f"{heads} Mamba heads (mamba_n_heads) of {head_dim} do not make up the width of the layers, {inner}"
        )
    return MambaConfig(
        layers=layers,
        heads=heads,
        head_dim=head_dim,
        groups=integer(raw, "mamba_n_groups"),
        state=integer(raw, "mamba_d_state"),
        conv=integer(raw, "mamba_d_conv"),
        conv_bias=flag(raw, "mamba_conv_bias"),
        in_bias=flag(raw, "mamba_proj_bias"),
        out_bias=flag(raw, "mamba_proj_bias"),
        norm_groups=1,
        norm_eps=number(raw, "rms_norm_eps"),
        dt_range=time_step_range(raw),
    )


def time_step_range(raw: HFConfig) -> tuple[float, float]:
    """`time_step_limit`. Writers that keep to JSON spell an infinite number as an object or a string."""
    found = raw.get("time_step_limit")
    if found is None:
        return 0.0, math.inf
    ends = [_float(end) for end in found] if isinstance(found, list | tuple) else []
    if len(ends) != 2 or None in ends:
        raise CheckpointError(f"config key 'time_step_limit' must be two numbers, found {found!r:.80}")
    low, high = ends
    assert low is not None and high is not None
    return max(low, 0.0), high


def _float(value: Any) -> float | None:
    if isinstance(value, Mapping) and value.keys() == {"__float__"}:
        value = value["__float__"]
    if isinstance(value, str) and value in ("Infinity", "inf"):
        return math.inf
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def ssm_sizes(keys: GGUFKeys) -> tuple[int, int]:
    """Heads of a Mamba layer in a GGUF file, and the size of each."""
    inner, heads = keys.whole("ssm.inner_size", 0), keys.whole("ssm.time_step_rank", 0)
    if not inner or not heads or inner % heads:
        raise CheckpointError(
            f"GGUF key {keys.architecture}.ssm.inner_size: {inner} is not a size of {heads} heads (ssm.time_step_rank)"
        )
    return heads, inner // heads


def mamba_from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    """Keys as Granite 4 and Bamba have them."""
    heads, size = ssm_sizes(keys)
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": size,
        "mamba_n_groups": keys.whole("ssm.group_count", 0),
        "mamba_d_state": keys.whole("ssm.state_size", 0),
        "mamba_d_conv": keys.whole("ssm.conv_kernel", 0),
        "mamba_expand": expansion(heads * size, config),
    }


def expansion(inner: int, config: HFConfig) -> int:
    """How many times as wide as the residual stream a Mamba layer is."""
    times, rest = divmod(inner, config["hidden_size"])
    if rest or not times:
        raise CheckpointError(f"Mamba layers of width {inner} are no multiple of {config['hidden_size']}")
    return int(times)


def rotated_in_gguf(keys: GGUFKeys) -> bool:
    """Whether attention rotates positions, in files of the architecture that Granite 4 and Bamba share."""
    rotated = keys("rope.scaling.finetuned", True)
    if not isinstance(rotated, bool):
        raise CheckpointError(
            f"{keys.architecture}.rope.scaling.finetuned must be true or false, found {rotated!r:.80}"
        )
    return rotated
