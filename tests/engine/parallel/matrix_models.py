"""The tiny models of `test_matrix`: every family in every form of weights, wide enough to be cut in four.

256 inputs everywhere, so that GGUF's blocks of 256 exist, and every cut of an output or down matrix goes through one.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import numpy as np

from penstock.engine.loading.gguf import GGMLType
from tests.engine.adapters.files import write_adapter
from tests.engine.loading import test_gguf_families as gguf_families
from tests.engine.loading.gguf_files import write_gguf
from tests.engine.quantization.layouts import write as write_layout
from tests.engine.tiny import write_checkpoint

SIZE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "head_dim": 32,
    "spread": 0.15,
}
WINDOW = {"sliding_window": 40}
CHANGES: dict[str, dict[str, Any]] = {
    "llama-gqa": {},
    "llama-mqa-tied": {},
    "mistral-window": WINDOW,
    "qwen3-qknorm": {},
    "qwen3-moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
    "gemma2": {"query_pre_attn_scalar": 32, **WINDOW},
}


class Models:
    """Writes what is asked for, once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model = cache(self._model)
        self.adapter = cache(self._adapter)
        self.dense = cache(self._dense)

    def _dense(self, family: str) -> Path:
        return write_checkpoint(family, self.root / family / "dense", **{**SIZE, **CHANGES[family]})

    def _model(self, family: str, stored: str) -> Path:
        """`stored`: empty, a layout of `layouts`, or a type of GGUF."""
        dense = self.dense(family)
        if not stored:
            return dense
        if stored in GGMLType.__members__:
            return self._gguf(dense, family, GGMLType[stored])
        return write_layout(dense, stored, self.root / family)[0]

    def _adapter(self, family: str, seed: int) -> Path:
        attention = ("q_proj", "k_proj", "v_proj", "o_proj")
        targets = attention if family == "qwen3-moe" else (*attention, "gate_proj", "up_proj", "down_proj")
        folder = self.root / family / f"adapter-{seed}"
        return write_adapter(folder, self.dense(family), targets=targets, seed=seed, rank=4 + 4 * seed, size=0.2)

    def _gguf(self, dense: Path, family: str, kind: GGMLType) -> Path:
        path = self.root / family / f"{kind.name}.gguf"

        def write(_: Path, metadata: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
            writer_type = gguf.GGMLQuantizationType[kind.name]
            matrices = [name for name in tensors if name.startswith("blk.") and tensors[name].ndim > 1]
            matrices = [name for name in matrices if "_inp." not in name and "norm" not in name]
            return write_gguf(path, metadata, tensors, dict.fromkeys(matrices, writer_type))

        def quantize(data: np.ndarray, to: gguf.GGMLQuantizationType) -> np.ndarray:
            if kind.name not in K_QUANTS:
                quantized: np.ndarray = reference(data, to)
                return quantized
            blocks: np.ndarray = K_QUANTS[kind.name](data.reshape(-1, 256))
            return blocks.reshape(*data.shape[:-1], -1)

        reference = gguf.quants.quantize
        with patch.object(gguf_families, "write_gguf", write), patch.object(gguf.quants, "quantize", quantize):
            return gguf_families.convert(dense, gguf_families.ARCHITECTURES.get(family, "llama"))


def half(numbers: np.ndarray) -> np.ndarray:
    return np.maximum(numbers, 1e-7).astype(np.float16).astype(np.float32)


def as_bytes(halves: np.ndarray) -> np.ndarray:
    return halves.astype(np.float16).reshape(-1, 1).view(np.uint8)


def q4_k(blocks: np.ndarray) -> np.ndarray:
    """Eight groups of 32 with a scale and a minimum of 6 bits each, which the reference package only reads."""
    parts = blocks.reshape(-1, 8, 32)
    low = np.maximum(-parts.min(-1), 0)
    step = (parts.max(-1) + low) / 15
    d, m = half(step.max(-1, keepdims=True) / 63), half(low.max(-1, keepdims=True) / 63)
    scale, minimum = (np.clip(np.rint(x), 0, 63) for x in (step / d, low / m))
    wide = (parts + (m * minimum)[..., None]) / np.maximum(d * scale, 1e-9)[..., None]
    quants = np.clip(np.rint(wide), 0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    s, n = scale.astype(np.uint8), minimum.astype(np.uint8)
    first, second = s[:, :4] | s[:, 4:] >> 4 << 6, n[:, :4] | n[:, 4:] >> 4 << 6
    third = s[:, 4:] & 15 | (n[:, 4:] & 15) << 4
    pairs = (quants[:, :, 0] | quants[:, :, 1] << 4).reshape(len(parts), -1)
    return np.concatenate((as_bytes(d), as_bytes(m), first, second, third, pairs), axis=1)


def q6_k(blocks: np.ndarray) -> np.ndarray:
    """Sixteen groups of 16 with a scale of 8 bits each, and 6 bits a weight."""
    parts = blocks.reshape(-1, 16, 16)
    step = np.abs(parts).max(-1) / 31
    d = half(step.max(-1, keepdims=True) / 127)
    scale = np.clip(np.rint(step / d), 1, 127)
    quants = (np.clip(np.rint(parts / (d * scale)[..., None]), -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low, high = quants & 15, quants >> 4
    lows = np.concatenate((low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4), axis=-1)
    highs = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    count = len(parts)
    scales = scale.astype(np.int8).view(np.uint8)
    return np.concatenate((lows.reshape(count, -1), highs.reshape(count, -1), scales, as_bytes(d)), axis=1)


K_QUANTS = {"Q4_K": q4_k, "Q6_K": q6_k}
