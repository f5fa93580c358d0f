"""Encoders on CUDA: the vectors of the CPU, whatever shares the batch; attention in one call; texts per second."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_harness import DEVICE, MODE, Row

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from penstock.engine.encoder.config import EncoderShape  # noqa: E402
from penstock.engine.encoder.model import Encoder, Packed, build_encoder  # noqa: E402

ON_DEVICE = MODE == "device"
SHAPE = EncoderShape(30522, 384, 6, 12, 512, 2, 1e-12, "mean", 512, False)
"""That of MiniLM."""


class Noise:
    """A checkpoint of random numbers."""

    config: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        wide = 4 * SHAPE.hidden
        sizes: dict[str, tuple[int, ...]] = {
            "embeddings.word_embeddings": (SHAPE.vocab_size, SHAPE.hidden),
            "embeddings.position_embeddings": (SHAPE.positions, SHAPE.hidden),
            "embeddings.token_type_embeddings": (2, SHAPE.hidden),
            "embeddings.LayerNorm": (SHAPE.hidden,),
        }
        for layer in range(SHAPE.layers):
            at = f"encoder.layer.{layer}"
            for name in ("query", "key", "value"):
                sizes[f"{at}.attention.self.{name}"] = (SHAPE.hidden, SHAPE.hidden)
            sizes[f"{at}.attention.output.dense"] = (SHAPE.hidden, SHAPE.hidden)
            sizes[f"{at}.attention.output.LayerNorm"] = sizes[f"{at}.output.LayerNorm"] = (SHAPE.hidden,)
            sizes[f"{at}.intermediate.dense"] = (wide, SHAPE.hidden)
            sizes[f"{at}.output.dense"] = (SHAPE.hidden, wide)
        draw = torch.Generator().manual_seed(0)
        self._tensors = {}
        for name, size in sizes.items():
            self._tensors[f"{name}.weight"] = torch.randn(size, generator=draw) * 0.05 + (len(size) == 1)
            self._tensors[f"{name}.bias"] = torch.randn(size[0], generator=draw) * 0.05

    def names(self) -> set[str]:
        return set(self._tensors)

    def tensor(self, name: str, device: str | torch.device = "cpu") -> torch.Tensor:
        return self._tensors[name].to(device)


def texts(count: int) -> list[list[int]]:
    draw = random.Random(1)
    lengths = sorted(max(4, min(512, round(draw.lognormvariate(3.7, 0.8)))) for _ in range(count))
    return [[draw.randrange(SHAPE.vocab_size) for _ in range(length)] for length in lengths]


def encode(encoder: Encoder, some: list[list[int]]) -> torch.Tensor:
    with torch.inference_mode():
        return encoder(Packed.of(some, [None] * len(some), encoder.device))


def test_the_device_gives_the_states_of_the_cpu() -> None:
    if not ON_DEVICE:
        return
    some = texts(24)
    here = build_encoder(Noise(), SHAPE, torch.device("cpu"), torch.float32)
    there = build_encoder(Noise(), SHAPE, DEVICE, torch.float32)
    by_length = encode(there, some).cpu()
    there.warm_up(attends_varlen=True)
    assert there._attend == there._attend_at_once, "attention is not one call here"
    at_once = encode(there, some).cpu()
    expected = encode(here, some)
    assert (by_length - expected).abs().max() < 1e-3
    assert (at_once - expected).abs().max() < 1e-3


def bench_encoder() -> Iterator[Row]:
    some = texts(512)
    tokens = sum(map(len, some))
    for dtype in (torch.float32, torch.bfloat16):
        encoder = build_encoder(Noise(), SHAPE, DEVICE, dtype)
        encoder.warm_up(attends_varlen=True)
        for _ in range(3):
            encode(encoder, some)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(5):
            encode(encoder, some)
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - begin) / 5
        speed = f"{512 / seconds:,.0f} texts/s, {tokens / seconds:,.0f} tokens/s"
        yield f"encoder {str(dtype).removeprefix('torch.')}", seconds * 1e6, speed
