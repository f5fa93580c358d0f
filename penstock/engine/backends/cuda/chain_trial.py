"""Whether steps of one token compute their products in chains: a trial, off until it has been measured on a device."""

from __future__ import annotations

import os

from penstock.errors import ConfigError

SETTING = "PENSTOCK_ONE_TOKEN"
"""Environment variable of an engine's process: `chain` or `launches`, which is what it is without it."""


def wanted() -> bool:
    value = os.environ.get(SETTING, "")
    if value not in ("", "launches", "chain"):
        raise ConfigError(f"{SETTING} is {value!r}: set it to 'chain' or 'launches', or remove it")
    return value == "chain"
