"""What a runner and its executor share: the model, its cache, the device rows."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine.adapters.runtime import AdapterRuntime
from penstock.engine.backends.interface import DeviceAccess
from penstock.engine.kv.cache import KVCache
from penstock.engine.models.decoder import Decoder
from penstock.engine.runner.inputs import InputBuilder
from penstock.engine.runner.rows import Rows


@dataclass(frozen=True, slots=True)
class RunnerResources:
    """See `Executor`."""

    backend: DeviceAccess
    decoder: Decoder
    kv: KVCache
    rows: Rows
    inputs: InputBuilder
    adapters: AdapterRuntime | None
    max_rows: int
    """Most sequences in a step; `rows` has one more, the scratch row."""
    max_verified: int
    """Most decoded tokens in a step that verifies draft tokens."""
    drawn_ahead: int = 0
    """Most tokens that a drafter draws one after the other behind those of a step; see `Executor.draw_ahead`."""
    scores_prompts: bool = True
    """Whether prompt log-probabilities come from this model: not from a draft model."""
