"""Paths that two API families share: the header that Anthropic's clients always send tells which of them is meant."""

from __future__ import annotations

from penstock.gateway.app.dialects import ANTHROPIC
from penstock.gateway.app.exchange import Exchange


def from_anthropic(exchange: Exchange) -> bool:
    """Whether a client of Anthropic's API asks; errors are then in its form too."""
    if exchange.header(b"anthropic-version") is None:
        return False
    exchange.dialect = ANTHROPIC
    return True
