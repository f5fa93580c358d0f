"""Writing small GGUF files for tests, with the reference package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np


def write_gguf(
    path: Path,
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray] | None = None,
    quantized: dict[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """A GGUF file with these key-value pairs and tensors; those named in `quantized` are stored in that type."""
    writer = gguf.GGUFWriter(path, str(metadata.get("general.architecture", "llama")))
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, data in (tensors or {}).items():
        kind = (quantized or {}).get(name)
        if kind is None:
            writer.add_tensor(name, data)
        else:
            writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
