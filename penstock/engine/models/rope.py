"""Rotary embedding (RoPE) as a checkpoint's configuration describes it. `layers.rotary` computes the tables.

Which key decides where several could is what the reference does, as are the defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from penstock.engine.loading.keys import KeyRules
from penstock.engine.models.reference_keys import ROPE
from penstock.errors import CheckpointError

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_SECTIONS = frozenset({"mrope_section", "mrope_interleaved", "interleaved", "xdrope_section"})
"""How frequencies are shared out between the axes of positions in images. A token of text has the same position on all
of them, so each frequency turns as it does without sections."""
_KEYS = KeyRules(reader="rotary embeddings", reference=ROPE, read={*ROPE, "type"}, inert=_SECTIONS)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Base frequency, and how frequencies are scaled for longer contexts."""

    rotated: float = 1.0
    """Share of a head's dimensions that is rotated, the first ones; of kind `proportional`, of its pairs."""
    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """yarn: whether the ends of the blended range are rounded to whole dimensions."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    """yarn: the factor of cosines and sines follows from these two, when both are given."""
    attention_factor: float | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    """longrope: a divisor of each frequency, for contexts within the original length and beyond it."""


NO_ROPE = RopeConfig(kind="none")
"""Of layers that know no positions."""
STILL = RopeConfig(kind="still")
"""The same over latents: what others rotate is as wide, and turns by nothing."""


def rope_parameters(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of rotary embeddings. Newer files keep everything under rope_parameters; older ones have rope_theta
    beside rope_scaling. The reference prefers the older key, and takes nothing from the newer one then."""
    parameters = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise CheckpointError(f"rope parameters must be an object, found {parameters!r:.80}")
    return parameters


def read_rope(
    raw: Mapping[str, Any],
    parameters: Mapping[str, Any] | None = None,
    aliases: Mapping[str, str] = MappingProxyType({}),
    *,
    partial: bool = False,
    proportional: bool = False,
) -> RopeConfig:
    """From the keys of a `config.json`.

    `parameters`: the rope keys, where they are not in the usual place. `aliases`: other names of scaling kinds.
    `partial`: whether the family can rotate a part of each head. `proportional`: whether it knows that kind.
    """
    parameters = rope_parameters(raw) if parameters is None else parameters
    if not isinstance(parameters, Mapping):
        raise CheckpointError(f"rope parameters must be an object, found {parameters!r:.80}")
    nested = [key for key, value in parameters.items() if isinstance(value, Mapping)]
    if nested:
        raise CheckpointError(f"rope parameters of their own for {', '.join(nested)} are not supported by this family")
    _KEYS.check(parameters, "rope_parameters")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    kind = aliases.get(kind, kind) if isinstance(kind, str) else kind
    known = (*KINDS, "proportional") if proportional else KINDS
    if not isinstance(kind, str) or kind not in known:
        raise CheckpointError(f"rope scaling {kind!r:.80} is not supported; supported: {', '.join(known)}")

    def given(key: str) -> Any:
        """The value of a key that may stand beside the rope parameters too."""
        return parameters[key] if key in parameters else raw.get(key)

    def number(key: str, default: float | None = None) -> float:
        value = given(key) if key in ("rope_theta", "partial_rotary_factor") else parameters.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise CheckpointError(f"rope {kind}: {key} must be a positive number, found {value!r:.80}")
        return float(value)

    def optional(key: str) -> float | None:
        return None if parameters.get(key) is None else float(parameters[key])

    rotated = number("partial_rotary_factor", 1.0)
    if rotated != 1.0 and not partial and kind != "proportional":
        raise CheckpointError(f"partial_rotary_factor is {rotated}, which this family does not support; supported: 1.0")

    def length(value: Any, default: int) -> int:
        value = value or default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < 1 << 31:
            raise CheckpointError(f"rope {kind}: a context length must be a positive integer, found {value!r:.80}")
        return int(value)

    positions = length(raw.get("max_position_embeddings"), 2048)
    # Where both are given the reference prefers the one outside.
    original = raw.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
    original = length(original, positions)
    factor = 1.0
    if kind in ("yarn", "longrope"):  # may give the two lengths instead of a factor
        factor = number("factor", positions / original)
    elif kind != "default":
        factor = number("factor", 1.0 if kind == "proportional" else None)
    return RopeConfig(
        rotated=rotated,
        theta=number("rope_theta", 10000.0),
        # Dynamic scaling begins where the trained window ends, and that is how long a context can be.
        kind="default" if kind == "dynamic" else kind,
        factor=1.0 if kind == "dynamic" else factor,
        low_freq_factor=number("low_freq_factor", 1.0),
        high_freq_factor=number("high_freq_factor", 4.0),
        original_max_positions=original,
        beta_fast=float(parameters.get("beta_fast") or 32.0),
        beta_slow=float(parameters.get("beta_slow") or 1.0),
        truncate=bool(parameters.get("truncate", True)),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        attention_factor=optional("attention_factor"),
        short_factor=tuple(float(value) for value in parameters.get("short_factor") or ()),
        long_factor=tuple(float(value) for value in parameters.get("long_factor") or ()),
    )
