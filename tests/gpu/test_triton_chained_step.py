"""A step of one token through a decoder whose layers are in chains of products: the hidden states of separate launches,
and what a layer takes of both."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from chain_cases import LLAMA_8B, LLAMA_70B, QWEN3_4B, QWEN3_17B, make_links
from gpu_harness import DEVICE, MODE, Row, bandwidth, check, rand, time_us
from latent_cases import BLOCK, OnTriton, make_batch
from test_triton_product_chain import build

from penstock.bench.shapes import named
from penstock.engine.backends.cuda import chains, exclusive
from penstock.engine.backends.cuda.chains import ONE_TOKEN
from penstock.engine.backends.cuda.fp8_quantizer import Fp8Quantizer
from penstock.engine.backends.cuda.kernels import common
from penstock.engine.backends.cuda.kernels.chain_plan import ChainShape, plan_chain
from penstock.engine.backends.cuda.ops import TritonOps
from penstock.engine.backends.cuda.warmup import _neighbours
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
    """One token after 300 others, through layers in FP8. One at a time has chains."""

    def __init__(self, config: dict[str, Any]) -> None:
        factory = OnTriton()
        with patch.dict(os.environ, {ONE_TOKEN: "chain"}):
            factory.ops = TritonOps(DEVICE)
        weights = RandomCheckpoint(config, dtype=BF16, device=DEVICE)
        self.chained: Decoder = build_decoder(
            weights, read_config(config), factory, dtype=BF16, max_positions=512, fused_up_to=8,
            quantize=Fp8Quantizer(DEVICE, BF16),
        )  # fmt: skip
        self.usual = dataclasses.replace(self.chained, chains=False)
        self.batch, blocks = make_batch([300], [])
        self.kv = KVCache(self.chained.cache_shape(BLOCK, BF16), blocks, DEVICE)
        for tensor in self.kv.tensors:
            tensor.copy_(rand(*tensor.shape, dtype=BF16))
        self.residual = rand(1, config["hidden_size"], dtype=BF16)

    def __call__(self, decoder: Decoder) -> torch.Tensor:
        return decoder.run(self.residual.clone(), self.batch, self.kv)


def alone(config: dict[str, Any]) -> Step:
    """One that has chains, whatever had them before: earlier ones are idle, and some may not be collected yet."""
    exclusive._owners.clear()
    return Step(config)


@contextmanager
def _early(on: bool) -> Iterator[None]:
    common.overlap_launches(on and MODE == "device")
    try:
        yield
    finally:
        common.overlap_launches(False)


def _build(decoders: Sequence[Decoder], step: Step, early: bool) -> None:
    """All kernels at once: one after another takes seconds each."""
    with _early(early), common.building_kernels(), torch.inference_mode():
        for decoder in decoders:
            step(decoder)


def offered() -> bool:
    """Whether there is a kernel for chains, in this mode and on this device. In the interpreter there is none: programs
    that wait for each other need a device."""
    return MODE == "device" and chains.has_kernel(DEVICE)


def test_hidden_states_equal_those_of_separate_launches() -> None:
    if not offered():
        return
    for name, config in (("small", SMALL), ("llama-8b", with_layers(named("llama-8b"), 2))):
        step = alone(config)
        assert step.chained.chained and not step.usual.chained
        assert len(list(_neighbours(step.chained))) == len(step.chained.layers) - 1
        assert not list(_neighbours(step.usual))
        first = step.chained.layers[:1]
        assert list(_neighbours(dataclasses.replace(step.chained, layers=first))) == [first * 2]
        del first
        for early in (False, True):
            _build([step.chained, step.usual], step, early)
            with _early(early):
                for turn in range(3):
                    got, want = step(step.chained), step(step.usual)
                    check(f"{name}, early {early}, {turn}", got, want, 2e-2)
        del step


def test_one_engine_of_a_process_has_chains() -> None:
    """Those of two might wait for each other; when the first is gone, the next one has them."""
    if not offered():
        return
    first = alone(SMALL)
    assert first.chained.chained and not Step(SMALL).chained.chained
    assert dataclasses.replace(first.chained).chained
    del first
    assert Step(SMALL).chained.chained


@contextmanager
def _shape(**changes: Any) -> Iterator[None]:
    """Chains that are made inside have another launch shape."""
    usual = chains.shape_on(DEVICE)
    with patch.object(chains, "shape_on", lambda _: dataclasses.replace(usual, **changes)):
        yield


VARIANTS: dict[str, dict[str, Any]] = {"chain": {}, "chain, without waits": {"waits": False}}
SIZES = {"llama-8b": LLAMA_8B, "llama-70b": LLAMA_70B, "qwen3-4b": QWEN3_4B, "qwen3-1.7b": QWEN3_17B}


def bench_layers() -> Iterator[Row]:
    """Microseconds of a layer with attention, everything twice: of models whose chain gained, and of those of the sizes
    below them, which say from how many bytes on it does."""
    if MODE == "compile":
        links = {name: make_links(sizes, bias=False, device=torch.device("meta")) for name, sizes in SIZES.items()}
        plans = {
            f"{name}, {kind}, {len(part)} links": plan_chain(part, ChainShape(132, **changes))
            for name, made in links.items()
            for kind, changes in VARIANTS.items()
            for part in (made, made[:3])  # the last layer has no next one
        }
        build({label: plan for label, plan in plans.items() if plan is not None})
    for name, sizes in SIZES.items() if offered() else ():
        step = alone(with_layers(named(name), 6))
        decoders = {"launches": step.usual}
        for kind, changes in VARIANTS.items():
            with _shape(**changes):
                decoders[kind] = dataclasses.replace(step.chained)
            assert decoders[kind].chained
        _build(list(decoders.values()), step, True)
        with _early(True):
            for _ in range(2):
                for kind, decoder in decoders.items():
                    us = time_us([lambda step=step, decoder=decoder: step(decoder)]) / len(decoder.layers)
                    yield bandwidth(f"{name} fp8, a layer, {kind}", us, sizes.weights)
        del step, decoders, decoder
