"""Whether two machines have the same checkpoint, without reading all of it.

The weights' digest covers the size of every weight file, its beginning (which names the tensors and their shapes) and
samples spread over the rest: another model, revision, fine-tune or quantization differs in all of them. It does not
find a few changed bytes between two samples; that is what the hashes of a download are for. File names do not count.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import CheckpointError

_BEGINNING = 1 << 20
_SAMPLES = 64
_SAMPLE = 4096
_LABELS = ("_name_or_path", "transformers_version")
"""Keys of config.json that say nothing about the model."""


@dataclass(frozen=True, slots=True)
class CheckpointDigest:
    """Equal on machines that have the same checkpoint."""

    config: str
    weights: str

    def difference(self, other: CheckpointDigest) -> str:
        """What differs, for a person; empty when nothing does."""
        if self.config != other.config:
            return f"another config.json ({other.config} and not {self.config})"
        return f"other weights ({other.weights} and not {self.weights})" if self.weights != other.weights else ""


def checkpoint_digest(path: str | Path) -> CheckpointDigest:
    """Of a folder with config.json and safetensors files, or of a GGUF file."""
    path = Path(path)
    try:
        files = [path] if path.is_file() else sorted(path.glob("*.safetensors")) or sorted(path.glob("*.gguf"))
        if not files:
            raise CheckpointError(f"{path} holds no checkpoint")
        config = path / "config.json"
        described = json.loads(config.read_text()) if config.is_file() else {}
        for label in _LABELS:
            described.pop(label, None)
        weights = hashlib.sha256("".join(sorted(_sampled(file) for file in files)).encode())
        return CheckpointDigest(_short(json.dumps(described, sort_keys=True)), weights.hexdigest()[:16])
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _sampled(file: Path) -> str:
    size = file.stat().st_size
    found = hashlib.sha256(str(size).encode())
    with file.open("rb") as handle:
        found.update(handle.read(_BEGINNING))
        if size > _BEGINNING:
            for number in range(_SAMPLES + 1):
                handle.seek(max(_BEGINNING, (size - _SAMPLE) * number // _SAMPLES))
                found.update(handle.read(_SAMPLE))
    return found.hexdigest()


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
