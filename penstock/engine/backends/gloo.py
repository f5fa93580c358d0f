"""Collectives through host memory: between ranks on CPU, and between those that share a GPU."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from penstock.errors import ConfigError


def gloo_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """See `Backend.process_group`."""
    if not dist.is_gloo_available():
        raise ConfigError("this torch was built without gloo, which ranks on CPU need")
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # Ranks of one engine share a machine; the name of the host may lead to a network that blocks them.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)
