"""A step of one token through a decoder whose layers are in chains of products: the hidden states of separate launches,
and what a layer takes of both."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from gpu_harness import DEVICE, MODE, Row, bandwidth, check, rand, time_us
from test_triton_latent import BLOCK, OnTriton, make_batch

from penstock.bench.shapes import named
from penstock.engine.backends.cuda.fp8_quantizer import Fp8Quantizer
from penstock.engine.backends.cuda.kernels import common, product_chain
from penstock.engine.backends.cuda.ops import TritonOps
from penstock.engine.backends.cuda.warmup import _neighbours
from penstock.engine.backends.interface import Link
from penstock.engine.kv.cache import KVCache
from penstock.engine.loading.random_checkpoint import RandomCheckpoint
from penstock.engine.models.build import build_decoder
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.families import read_config
from penstock.planning.model_shape import with_layers

BF16 = torch.bfloat16
SMALL: dict[str, Any] = {
    "model_type": "qwen2", "vocab_size": 199, "hidden_size": 192, "intermediate_size": 544, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
}  # fmt: skip


class Step:
    """One token after 300 others."""

    def __init__(self, config: dict[str, Any], fp8: bool) -> None:
        factory = OnTriton()
        factory.ops = TritonOps(DEVICE)
        factory.ops.chains = True
        weights = RandomCheckpoint(config, dtype=BF16, device=DEVICE)
        self.chained: Decoder = build_decoder(
            weights, read_config(config), factory, dtype=BF16, max_positions=512, fused_up_to=8,
            quantize=Fp8Quantizer(DEVICE, BF16) if fp8 else None,
        )  # fmt: skip
        self.usual = dataclasses.replace(self.chained, chains=False)
        self.batch, blocks = make_batch([300], [])
        self.kv = KVCache(self.chained.cache_shape(BLOCK, BF16), blocks, DEVICE)
        for tensor in self.kv.tensors:
            tensor.copy_(rand(*tensor.shape, dtype=BF16))
        self.residual = rand(1, config["hidden_size"], dtype=BF16)

    def __call__(self, decoder: Decoder) -> torch.Tensor:
        return decoder.run(self.residual.clone(), self.batch, self.kv)


def _shapes() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "small", SMALL
    if MODE == "device":
        for name in ("llama-8b", "qwen3-0.6b"):
            yield name, with_layers(named(name), 3)


@contextmanager
def _early(on: bool) -> Iterator[None]:
    common.overlap_launches(on and MODE == "device")
    try:
        yield
    finally:
        common.overlap_launches(False)


def _build(steps: Sequence[Step], early: bool) -> None:
    """All kernels at once: one after another takes seconds each."""
    if MODE == "device":
        with _early(early), common.building_kernels(), torch.inference_mode():
            for step in steps:
                step(step.chained)
                step(step.usual)


def offered() -> bool:
    """Whether there is a kernel for chains, in this mode and on this device. In the interpreter there is none: programs
    that wait for each other need a device."""
    weight = torch.empty(64, 64, dtype=BF16, device=DEVICE)
    return MODE != "interpret" and product_chain.applies([Link(weight)], DEVICE)


def test_hidden_states_equal_those_of_separate_launches() -> None:
    if not offered():
        return
    steps = {(name, fp8): Step(config, fp8) for name, config in _shapes() for fp8 in (False, True)}
    for early in (False, True):
        _build(list(steps.values()), early)
        for (name, fp8), step in steps.items():
            assert step.chained.chained and not step.usual.chained
            assert len(list(_neighbours(step.chained))) == 2 and not list(_neighbours(step.usual))
            first = step.chained.layers[:1]
            assert list(_neighbours(dataclasses.replace(step.chained, layers=first))) == [first * 2]
            with _early(early):
                for turn in range(3):
                    got, want = step(step.chained), step(step.usual)
                    check(f"{name}, fp8 {fp8}, early {early}, {turn}", got, want, 2e-2)


@contextmanager
def _shape(**changes: Any) -> Iterator[None]:
    """Chains that are made inside have another launch shape."""
    usual = product_chain.shape_on(DEVICE)
    with patch.object(product_chain, "shape_on", lambda _: dataclasses.replace(usual, **changes)):
        yield


def tune_layers() -> Iterator[Row]:
    """What a chain leaves to attention decides on a layer: shared memory, registers, and how far it reads ahead."""
    if MODE != "device" or not offered():
        return
    for fp8 in (True, False):
        step = Step(with_layers(named("llama-8b"), 6), fp8)
        for changes in (
            {}, {"stages": 3}, {"stages": 5}, {"stages": 6}, {"registers": 64}, {"registers": 128},
            {"tensor": False}, {"tensor": False, "registers": 80}, {"warps": 8, "stages": 8}, {"waits": False}, {},
        ):  # fmt: skip
            with _shape(**changes):
                chained = dataclasses.replace(step.chained)
            _build([step], True)
            with _early(True):
                us = time_us([lambda step=step, decoder=chained: step(decoder)]) / len(chained.layers)
            yield f"llama-8b {'fp8' if fp8 else 'bf16'}, a layer, {changes or 'as it is'}", us, ""


def bench_layers() -> Iterator[Row]:
    if MODE != "device" or not offered():
        return
    shapes = [(name, fp8) for name in ("llama-8b", "qwen3-0.6b", "llama-70b") for fp8 in (True, False)]
    steps = [Step(with_layers(named(name), 6), fp8) for name, fp8 in shapes]
    _build(steps, True)
    with _early(True):
        for (name, fp8), step in zip(shapes, steps, strict=True):
            layers = len(step.chained.layers)
            read = sum(linear.weight_bytes for layer in step.chained.layers for linear in layer.linears) / layers
            for kind, decoder in (("in chains", step.chained), ("separate", step.usual)):
                us = time_us([lambda step=step, decoder=decoder: step(decoder)]) / layers
                yield bandwidth(f"{name} {'fp8' if fp8 else 'bf16'}, a layer, {kind}", us, read)
