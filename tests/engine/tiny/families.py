"""Every family with a tiny checkpoint: the reference's configuration class, and what differs from `COMMON`."""

from __future__ import annotations

from typing import Any

from tests.engine.tiny import dense, experts, latent, states

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **dense.FAMILIES,
    **experts.FAMILIES,
    **latent.FAMILIES,
    **states.FAMILIES,
}
