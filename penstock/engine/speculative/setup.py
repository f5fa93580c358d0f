"""Speculation as the configuration asks for it."""

from __future__ import annotations

import time

from penstock.engine.config import EngineConfig
from penstock.engine.speculative.ngram import NgramProposer
from penstock.engine.speculative.speculation import Speculation


def make_speculation(config: EngineConfig, max_running: int, *, overlap: bool) -> Speculation | None:
    """What `Engine` takes, or None."""
    if config.speculation == "off":
        return None
    return Speculation(
        NgramProposer(config.speculation_depth),
        depth=config.speculation_depth,
        most_tokens=config.max_verified(max_running),
        overlap=overlap,
        clock=time.monotonic,
    )
