"""Variants that no device has been timed with yet. Each is off unless an environment variable says otherwise.

A trial ends with its measurement: it becomes the rule or goes, and its variable with it. What decides on each is in
`docs/results/h200-kernels.md`. They are read when the process starts and hold for the whole of it.
"""

from __future__ import annotations

import logging
import os

from penstock.errors import ConfigError

log = logging.getLogger(__name__)

CAPTURE_GATHERED = "PENSTOCK_CAPTURE_GATHERED"
"""Captured prompt steps over quantized caches gather keys too, where contexts are short."""

ONE_TOKEN = "PENSTOCK_ONE_TOKEN"
"""How steps of one token compute the products between two attentions: `chain`, in one launch, or `launches`."""


def is_on(variable: str) -> bool:
    """Whether the environment asks for a trial."""
    value = os.environ.get(variable, "0")
    if value not in ("0", "1"):
        raise ConfigError(f"{variable}: {value!r} must be 1 (tried) or 0 (not)")
    if value == "1":
        log.warning("%s is on: a variant that no device has been timed with", variable)
    return value == "1"


def one_token_in_chains() -> bool:
    value = os.environ.get(ONE_TOKEN, "") or "launches"
    if value not in ("launches", "chain"):
        raise ConfigError(f"{ONE_TOKEN}: {value!r} must be chain (tried) or launches (not)")
    if value == "chain":
        log.warning("%s is chain: a variant that no device has been timed with", ONE_TOKEN)
    return value == "chain"
