"""What two engines must have in common to use each other's blocks, as one line of text to compare.

The weights are named by a digest of pieces of their files, spread over their whole length: as good as reading all of
them for telling checkpoints apart, merged adapters and further training included, and done in milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from penstock.engine.backends.interface import KeySmoothing
from penstock.engine.config import EngineConfig
from penstock.engine.kv.cache import CacheShape

_PIECES = 256
_PIECE_BYTES = 512


def kv_format(config: EngineConfig, shape: CacheShape, dtype: str, smoothings: Sequence[KeySmoothing] = ()) -> str:
    """`dtype`: of the activations, from which keys and values are computed. `smoothings`: of the keys, by layer."""
    return f"weights {fingerprint(Path(config.model))} as {config.weights} in {dtype}, {shape}" + (
        f", keys smoothed by {_digest_of(smoothings)}" if smoothings else ""
    )


def _digest_of(smoothings: Sequence[KeySmoothing]) -> str:
    digest = blake2b(digest_size=8)
    for smoothing in smoothings:
        for part in smoothing:
            digest.update(part.cpu().numpy().tobytes())
    return digest.hexdigest()


def fingerprint(model: Path) -> str:
    """Of a checkpoint folder or file; equal for copies of it under any path."""
    digest = blake2b(digest_size=8)
    files = [model] if model.is_file() else sorted([*model.glob("*.safetensors"), *model.glob("*.gguf")])
    for file in files:
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as handle:
            for piece in range(_PIECES):
                handle.seek(size * piece // _PIECES)
                digest.update(handle.read(_PIECE_BYTES))
    described = model / "config.json"
    if described.is_file():
        digest.update(described.read_bytes())
    return digest.hexdigest()
