"""Rotary embedding as the metadata and tensors of a GGUF file describe it, as `rope_scaling` of a `config.json`.

llama.cpp's rules: without a type a factor is linear; `attn_factor` multiplies the factor of cosines and sines that the
type has anyway; divisors of frequencies are given one by one in tensors.
"""

from __future__ import annotations

import math
from typing import Any

from penstock.engine.loading.gguf import GGUFFile
from penstock.engine.models.families import GGUFKeys
from penstock.engine.models.families.family import short_decimal
from penstock.errors import CheckpointError

_TYPES = ("none", "linear", "yarn", "longrope")
_WITH_DIVISORS = (
    "llama",
    "llama4",
    "mistral3",
    "phi3",
    "exaone4",
    "exaone-moe",
    "arcee",
    "gemma4",
    "apertus",
    "minicpm3",
    "granite_swa",
    "step35",
)
"""Architectures whose files may hold divisors of frequencies."""
_DEEPSEEK_YARN = ("deepseek2", "deepseek32", "glm-dsa", "mistral4")
"""Architectures in which yarn scales scores; see `_deepseek_magnitudes`."""
_GROWING = ("mistral3", "mistral4")
"""Architectures whose queries may grow with their position."""
_HALVED = ("step35",)
"""Architectures of which layers that see everything rotate half of the dimensions that a file gives. Divisors behind
those of these layers are not read."""
_NOTHING_LEFT = 1e29
"""Divided by this and more, no position turns a pair of dimensions."""


def rope_scaling(file: GGUFFile, key: GGUFKeys, config: dict[str, Any]) -> dict[str, Any] | None:
    """`rope_scaling` of a model; may set `original_max_position_embeddings`."""
    kind = key("rope.scaling.type", "linear")
    if kind not in _TYPES:
        raise CheckpointError(
            f"{file.path}: {key.architecture}.rope.scaling.type is {kind!r:.80}; supported: {', '.join(_TYPES)}"
        )
    factor = key.number("rope.scaling.factor", key.number("rope.scale_linear", 0.0)) or 1.0
    attention = key.number("rope.scaling.attn_factor", 1.0)
    if factor <= 0 or attention <= 0:
        raise CheckpointError(
            f"{file.path}: rope is scaled by {factor:g} with attn_factor {attention:g}; not supported"
        )
    if kind == "none" and key.architecture != "llama4":  # of which llama.cpp scales the layers with chunks all the same
        factor = 1.0
    original = key.whole("rope.scaling.original_context_length", 0) or config["max_position_embeddings"]
    if key.architecture not in _GROWING and key.number("attention.temperature_scale", 0.0) != 0.0:
        raise CheckpointError(f"attention.temperature_scale is not supported for {key.architecture} files")
    pairs = (key.whole("rope.dimension_count", 0) or config["head_dim"]) // 4 if key.architecture in _HALVED else None
    divisors = _divisors(file, key, pairs)
    if key.architecture == "gemma4":
        return _proportional(file, divisors, kind, factor, config["head_dim"])
    if kind == "yarn":
        if divisors is not None:
            raise CheckpointError(f"{file.path}: rope is scaled by yarn and by factors in tensors; not supported")
        return _yarn(file, key, factor, attention, original)
    if divisors is not None:
        short, long = divisors
        if short is not long:
            config["original_max_position_embeddings"] = original
        elif factor == attention == 1.0 and (rule := _llama3(short, config)) is not None:
            return rule
        elif factor == attention == 1.0 and all(divisor == 1.0 for divisor in short):
            return None
        return _one_by_one([d * factor for d in short], [d * factor for d in long], attention, original)
    if attention != 1.0:
        rotated = int(config["head_dim"] * config.get("partial_rotary_factor", 1.0))
        return _one_by_one([factor] * (rotated // 2), [factor] * (rotated // 2), attention, original)
    return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}


def _proportional(
    file: GGUFFile, divisors: tuple[list[float], list[float]] | None, kind: str, factor: float, head: int
) -> dict[str, Any]:
    """Gemma 4's layers that see everything rotate their first frequencies. The others are divided by so much that
    nothing is left of them."""
    if divisors is None or kind == "yarn" or factor != 1.0:
        raise CheckpointError(f"{file.path}: gemma4 files must have rope_freqs.weight, and no other scaling of rope")
    found = divisors[0]
    rotated = sum(divisor == 1.0 for divisor in found)
    wrong = {*found[:rotated]} - {1.0} or any(divisor < _NOTHING_LEFT for divisor in found[rotated:])
    if wrong or not rotated or 2 * len(found) != head:
        raise CheckpointError(
            f"{file.path}: rope_freqs.weight of gemma4 files must be ones, and 1e30 behind them, {head // 2} together"
        )
    return {"rope_type": "proportional", "partial_rotary_factor": rotated / len(found)}


def _yarn(file: GGUFFile, key: GGUFKeys, factor: float, attention: float, original: int) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for theirs, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if (beta := key.number(f"rope.scaling.{theirs}", 0.0)) != 0.0:
            scaling[ours] = beta
    if key.architecture in _DEEPSEEK_YARN:
        return scaling | _deepseek_magnitudes(file, key, attention)
    log_multiplier = key.number("rope.scaling.yarn_log_multiplier", 0.0)
    if log_multiplier and key.architecture != "mistral3":
        raise CheckpointError(f"{file.path}: yarn_log_multiplier is not supported for {key.architecture} files")
    magnitude = _magnitude(factor, 1.0) / (_magnitude(factor, log_multiplier) if log_multiplier else 1.0)
    if log_multiplier or attention != 1.0:
        scaling["attention_factor"] = magnitude * attention
    # What it means differs between programs, unless it is what they take anyway.
    stated = key.number("rope.scaling.yarn_attn_factor", magnitude)
    extrapolation = key.number("rope.scaling.yarn_ext_factor", 1.0)
    if not math.isclose(stated, magnitude, rel_tol=1e-5) or extrapolation not in (1.0, -1.0):
        raise CheckpointError(f"{file.path}: yarn_attn_factor or yarn_ext_factor has a value that is not supported")
    return scaling


def _deepseek_magnitudes(file: GGUFFile, key: GGUFKeys, attention: float) -> dict[str, Any]:
    """What scales scores with the factor, of which the file holds a tenth, and what scales cosines and sines. Files do
    not say the latter: in deepseek2 it is the same, so that they stay as they are, elsewhere 1."""
    tenth = key.number("rope.scaling.yarn_log_multiplier", 0.0)
    others = (
        attention,
        key.number("rope.scaling.yarn_attn_factor", 1.0),
        key.number("rope.scaling.yarn_ext_factor", 1.0),
    )
    if tenth <= 0 or others != (1.0, 1.0, 1.0):
        raise CheckpointError(
            f"{file.path}: yarn in {key.architecture} files needs yarn_log_multiplier, and no attn_factor, "
            "yarn_attn_factor or yarn_ext_factor other than 1"
        )
    magnitude = short_decimal(10 * tenth)
    return {"mscale": magnitude if key.architecture == "deepseek2" else 1.0, "mscale_all_dim": magnitude}


def _magnitude(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _divisors(file: GGUFFile, key: GGUFKeys, pairs: int | None) -> tuple[list[float], list[float]] | None:
    """Of each frequency, or of the first `pairs`, in short and in long contexts."""
    names = [name for name in ("short", "long") if f"rope_factors_{name}.weight" in file.tensors]
    plain = "rope_freqs.weight" in file.tensors
    if not names and not plain:
        return None
    if len(names) == 1 or (names and plain) or key.architecture not in _WITH_DIVISORS:
        raise CheckpointError(
            f"{file.path}: its tensors of rotary factors do not fit together, or not its architecture"
        )
    if plain:
        factors = file.floats("rope_freqs.weight")[:pairs]
        return factors, factors
    return file.floats("rope_factors_short.weight")[:pairs], file.floats("rope_factors_long.weight")[:pairs]


def _one_by_one(short: list[float], long: list[float], attention: float, original: int) -> dict[str, Any]:
    if not all(math.isfinite(divisor) and divisor > 0 for divisor in (*short, *long)):
        raise CheckpointError("rotary factors must be positive numbers; the file is damaged")
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
        "attention_factor": attention,
    }


def _llama3(factors: list[float], config: dict[str, Any]) -> dict[str, Any] | None:
    """The rule of Llama 3 that the divisors came from, where they did."""
    largest = float(f"{max(factors, default=1.0):.5g}")
    rule = {
        "rope_type": "llama3",
        "factor": largest,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if not 1.0 < largest < 1e30:
        return None
    expected = llama3_factors(rule, config["rope_theta"], config["head_dim"])
    alike = len(expected) == len(factors) and all(
        math.isclose(a, b, rel_tol=1e-4) for a, b in zip(expected, factors, strict=True)
    )
    return rule if alike else None


def llama3_factors(rule: dict[str, Any], theta: float, head_dim: int) -> list[float]:
    """By how much Llama 3's scaling divides each rotary frequency: 1 for short wavelengths, `factor` for long
    ones, interpolated in between."""
    factors = []
    low, high, old = rule["low_freq_factor"], rule["high_freq_factor"], rule["original_max_position_embeddings"]
    for index in range(0, head_dim, 2):
        turns = old * theta ** (-index / head_dim) / (2 * math.pi)
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / rule["factor"] + smooth))
    return factors
