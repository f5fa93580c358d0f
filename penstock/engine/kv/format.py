"""What two engines must have in common to use each other's blocks, as one line of text to compare.

The weights are named by a digest of pieces of their files, spread over their whole length: as good as reading all of
them for telling checkpoints apart, merged adapters and further training included, and done in milliseconds.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from penstock.engine.config import EngineConfig
from penstock.engine.kv.block_hash import NAMING
from penstock.engine.kv.cache import CacheShape

CALIBRATION = 1
"""Grows when calibration comes to other smoothings for the same weights."""
_PIECES = 256
_PIECE_BYTES = 512


def kv_format(config: EngineConfig, shape: CacheShape, dtype: str, smoothed: bool = False) -> str:
    """`shape`: of whole blocks, on however many devices. `dtype`: of the activations, from which keys and values are
    computed. `smoothed`: whether keys are.

    How they are smoothed follows from the weights (`calibration`), which are named here; that two grids of devices
    round the sums behind it differently is far below the steps of int8.
    """
    text = f"weights {fingerprint(Path(config.model))} as {config.weights} in {dtype}, {shape}, names {NAMING}"
    return f"{text}, keys smoothed (calibration {CALIBRATION})" if smoothed else text


def fingerprint(model: Path) -> str:
    """Of a checkpoint folder or file; equal for copies of it under any path."""
    digest = blake2b(digest_size=8)
    for file in weight_files(model):
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


def weight_files(model: Path) -> list[Path]:
    """Of a checkpoint folder or file."""
    return [model] if model.is_file() else sorted([*model.glob("*.safetensors"), *model.glob("*.gguf")])
