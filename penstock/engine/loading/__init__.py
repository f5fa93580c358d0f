"""Reading models: safetensors folders and GGUF files, dense or quantized, and random checkpoints.

The gateway uses `gguf` and `gguf_config`, which need no torch; the names below need it and are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.engine.loading.checkpoint import Checkpoint, open_checkpoint
    from penstock.engine.loading.random_checkpoint import RandomCheckpoint

__all__ = ["Checkpoint", "RandomCheckpoint", "open_checkpoint"]


def __getattr__(name: str) -> Any:
    if name == "RandomCheckpoint":
        from penstock.engine.loading import random_checkpoint

        return random_checkpoint.RandomCheckpoint
    if name in __all__:
        from penstock.engine.loading import checkpoint

        return getattr(checkpoint, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
