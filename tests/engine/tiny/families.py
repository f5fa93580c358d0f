"""Every family with a tiny checkpoint: the reference's configuration class, and what differs from `COMMON`."""

from __future__ import annotations

from typing import Any

import transformers

from tests.engine.tiny import dense, experts, latent, states

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    family: made
    for families in (dense.FAMILIES, experts.FAMILIES, latent.FAMILIES, states.FAMILIES)
    for family, made in families.items()
    # A GPU machine may have an older release of the library than the one that is pinned, which has all of them.
    if not made[0].startswith(("MistralLarge4", "Muse")) or hasattr(transformers, made[0])
}
