"""Variants that no device has been timed with yet. Each is off unless an environment variable says otherwise.

A trial ends with its measurement: it becomes the rule or goes, and its variable with it. What decides on each is in
`docs/results/h200-kernels.md`, or `adapters.md` beside it. They are read when the process starts and hold for the whole
of it.
"""

from __future__ import annotations

import logging
import os

from penstock.errors import ConfigError

log = logging.getLogger(__name__)

LORA_IN_GATE = "PENSTOCK_LORA_IN_GATE"
"""In decode steps of many tokens the gate multiplies by B of its adapters, in the same launch."""


def is_on(variable: str) -> bool:
    """Whether the environment asks for a trial."""
    value = os.environ.get(variable, "0")
    if value not in ("0", "1"):
        raise ConfigError(f"{variable}: {value!r} must be 1 (tried) or 0 (not)")
    if value == "1":
        log.warning("%s is on: a variant that no device has been timed with", variable)
    return value == "1"
