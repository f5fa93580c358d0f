"""Sampling values of requests that give none: from the configuration, the catalogue of models, or the checkpoint."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from penstock.config.fields import setting


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """A value that is not set is left to whoever comes next: another source, or the neutral value of the API."""

    temperature: float | None = setting(
        None, doc="Temperature of requests that give none; 0: always the likeliest token.",
        least=0, most=2, example="0.7",
    )  # fmt: skip
    top_p: float | None = setting(None, doc="top_p of requests that give none.", least=0, most=1, example="0.9")
    top_k: int | None = setting(
        None, doc="top_k of requests that give none; 0: no limit.", least=0, most=2**31 - 1, example="40"
    )
    min_p: float | None = setting(
        None, doc="min_p of requests that give neither it nor a temperature.", least=0, most=1, example="0.05"
    )
    typical_p: float | None = setting(None, doc="typical_p of requests that give none.", least=0, most=1, example="1")
    presence_penalty: float | None = setting(
        None, doc="presence_penalty of requests that give none.", least=-2, most=2, example="0"
    )
    frequency_penalty: float | None = setting(
        None, doc="frequency_penalty of requests that give none.", least=-2, most=2, example="0"
    )
    repetition_penalty: float | None = setting(
        None, doc="repetition_penalty of requests that give none.", least=0.01, most=10, example="1.1"
    )
    max_tokens: int | None = setting(
        None, doc="Completion limit of chat requests without one; generation.default_max_tokens may be lower.",
        least=1, example="2048",
    )  # fmt: skip

    @property
    def given(self) -> dict[str, float]:
        """Those that are set."""
        named = {name: getattr(self, name) for name in NAMES}
        return {name: value for name, value in named.items() if value is not None}

    def over(self, other: SamplingDefaults) -> SamplingDefaults:
        """These values, and those of `other` for what is not set."""
        return SamplingDefaults(**{**other.given, **self.given})  # type: ignore[arg-type]


NAMES = tuple(field.name for field in dataclasses.fields(SamplingDefaults))
UNSET_DEFAULTS = SamplingDefaults()


@dataclass(frozen=True, slots=True)
class SamplingConfig(SamplingDefaults):
    """Sampling values of requests that give none."""

    from_checkpoint: bool = setting(
        True, doc="Whether values that are not set come from the checkpoint (generation_config.json, GGUF metadata) or "
        "the catalogue; false: the API's own (temperature 1, no filters).",
    )  # fmt: skip


def usable(values: Mapping[str, Any]) -> tuple[SamplingDefaults, list[str]]:
    """The values of a checkpoint that can be used, and the names of the others: of a wrong type or out of range."""
    kinds = get_type_hints(SamplingDefaults)
    good: dict[str, Any] = {}
    bad = []
    for field in dataclasses.fields(SamplingDefaults):
        value = values.get(field.name)
        if value is None:
            continue
        kind, least, most = get_args(kinds[field.name])[0], field.metadata["least"], field.metadata["most"]
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value < least or (most is not None and value > most) or kind(value) != value:
            bad.append(field.name)
        else:
            good[field.name] = kind(value)
    return SamplingDefaults(**good), bad
