"""A step of one token through layers of experts, as the engine runs it: what a layer takes, and each of its kernels."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from gpu_harness import DEVICE, MODE, Row, integers, rand, time_us
from latent_cases import BLOCK, OnTriton, make_batch
from torch import Tensor

from penstock.bench.bounds import probe
from penstock.bench.shapes import named
from penstock.engine.backends.cuda.kernels import common, gemv, moe_one
from penstock.engine.backends.cuda.kernels.gemv_shapes import GemvConfig
from penstock.engine.backends.cuda.kernels.moe_one import OneConfig
from penstock.engine.backends.interface import StateBatch
from penstock.engine.kv.cache import KVCache
from penstock.engine.loading.random_checkpoint import RandomCheckpoint
from penstock.engine.models.build import build_decoder
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.families import read_config
from penstock.planning.model_shape import with_layers

BF16 = torch.bfloat16
KERNELS = "penstock.engine.backends.cuda.kernels."


def label_of(kernel: Any, grid: tuple[int, ...]) -> str:
    return f"{kernel.fn.__name__.strip('_')} {'x'.join(map(str, grid))}"


@contextmanager
def launches(instead: Callable[..., None]) -> Iterator[None]:
    """Every launch of a kernel goes through `instead`, which is given `launch` first."""
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith(KERNELS) and hasattr(module, "launch") and module is not common:
                stack.enter_context(
                    patch.object(module, "launch", lambda *args, **options: instead(common.launch, *args, **options))
                )
        yield


@contextmanager
def same_buffers() -> Iterator[Callable[[], None]]:
    """`torch.empty` gives the same tensors again after each call of what is yielded: what a kernel that is left out
    would have written is there from a step before."""
    original = torch.empty
    made: list[Tensor] = []
    place = 0

    def empty(*args: Any, **options: Any) -> Tensor:
        nonlocal place
        if place == len(made):
            made.append(original(*args, **options).zero_())
        place += 1
        return made[place - 1]

    def empty_like(other: Tensor) -> Tensor:
        return empty(other.shape, dtype=other.dtype, device=other.device)

    def again() -> None:
        nonlocal place
        place = 0

    with patch.object(torch, "empty", empty), patch.object(torch, "empty_like", empty_like):
        yield again


class Step:
    """One token through the layers of a shape, after 300 others."""

    def __init__(self, config: dict[str, Any], skipped: int = 0) -> None:
        layers = config["num_hidden_layers"]
        weights = RandomCheckpoint(config, dtype=BF16, device=DEVICE)
        decoder = build_decoder(
            weights, read_config(config), OnTriton(), dtype=BF16, max_positions=4096, fused_up_to=8
        )  # fmt: skip
        batch, blocks = make_batch([300], [])
        ones, zeros = integers([1], torch.int32), integers([0], torch.int32)
        self.batch = replace(batch, states=StateBatch(zeros, zeros, ones, ones))
        kv = KVCache(decoder.cache_shape(BLOCK, BF16), blocks, DEVICE, num_states=2)
        self.kv = kv.of_layers(skipped, layers)
        self.decoder: Decoder = replace(decoder, layers=decoder.layers[skipped:])
        self.residual = rand(1, decoder.config.hidden_size, dtype=BF16)
        self.layers = layers - skipped
        self.read = sum(self._read(layer) for layer in self.decoder.layers)

    def _read(self, layer: Any) -> int:
        """Bytes of the weights that one token reads."""
        routed = getattr(layer.feed_forward, "routed", layer.feed_forward)
        count, visited = routed.gate_up.experts, routed.choice.top_k
        stacks = routed.gate_up.weight_bytes + routed.down.weight_bytes
        return int(layer.mixer.weight_bytes + layer.feed_forward.weight_bytes - stacks * (count - visited) // count)

    def __call__(self) -> None:
        residual, eps = self.residual, self.decoder.config.rms_eps
        for layer, cache in zip(self.decoder.layers, self.kv.layers, strict=True):
            mixer: Any = layer.mixer
            feed_forward: Any = layer.feed_forward
            residual = mixer.fused(residual, layer.mixer_norm, eps, self.batch, cache)
            residual = feed_forward.fused(residual, layer.feed_forward_norm, eps)

    def counted(self) -> Counter[str]:
        """The launches of a step."""
        found: Counter[str] = Counter()

        def count(launch: Callable[..., None], kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
            found[label_of(kernel, grid)] += 1

        with launches(count):
            self()
        return found


def _timed(step: Step, left_out: str = "") -> float:
    """Microseconds of a layer, with kernels that start early."""
    skipped = ""

    def run(launch: Callable[..., None], kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        if label_of(kernel, grid) != skipped:
            launch(kernel, grid, *args, **options)

    with launches(run), same_buffers() as again:

        def once() -> None:
            again()
            step()

        once()
        skipped = left_out
        return time_us([once], repeats=9) / step.layers


def _report(name: str, step: Step, variants: dict[str, Any]) -> Iterator[Row]:
    bound = probe(torch.device("cuda", 0), BF16).read_gbps

    def share(us: float) -> str:
        return f"{step.read / step.layers / bound / us / 10:.0f}% of the read bound" if us else "-"

    common.overlap_launches(True)
    try:
        with common.building_kernels():
            step()
            for change in variants.values():
                with change():
                    step()
        whole = _timed(step)
        yield f"{name}, a layer of {step.read / step.layers / 1e6:.1f} MB", whole, share(whole)
        for label, count in step.counted().items():
            us = _timed(step, label)
            yield f"{name}, {label}: {count / step.layers:.2f} a layer", (whole - us) * step.layers / count, "each"
        for label, change in variants.items():
            with change():
                us = _timed(step)
            yield f"{name}, {label}", us, share(us)
        us = _timed(step)
        yield f"{name}, a layer again", us, share(us)
    finally:
        common.overlap_launches(False)


def patched(*changes: tuple[Any, str, Any]) -> Callable[[], Any]:
    @contextmanager
    def change() -> Iterator[None]:
        with ExitStack() as stack:
            for module, name, value in changes:
                stack.enter_context(patch.object(module, name, value))
            yield

    return change


def product(n: int, rows: int, warps: int) -> tuple[Any, str, Any]:
    """Another launch shape for the product with `n` outputs."""
    usual = gemv.choose

    def choose(outputs: int, *args: Any) -> GemvConfig:
        return GemvConfig("rows", rows, warps * 256, warps, 1) if outputs == n else usual(outputs, *args)

    return gemv, "choose", choose


def first_product(rows: int, warps: int) -> tuple[Any, str, Any]:
    return moe_one, "_gate_up_shape", lambda *_: OneConfig(rows, warps * 256, warps)


def second_product(step: int, loads: int) -> tuple[Any, str, Any]:
    return moe_one, "_down_shape", lambda width: OneConfig(1, step, step // 256, loads)


def shape_of(name: str, layers: int) -> dict[str, Any]:
    return {**with_layers(named(name), layers), "vocab_size": 4096}


def bench_deepseek() -> Iterator[Row]:
    if MODE != "device":
        return
    step = Step(shape_of("deepseek-v2-lite", 5), skipped=1)
    yield from _report("deepseek", step, {
        "choice made by every program": patched((moe_one, "MOST_RANKED", 64)),
        "first product 2 rows": patched(first_product(2, 4)),
        "first product 2 rows, second one warp": patched(first_product(2, 4), second_product(256, 12)),
    })  # fmt: skip


def bench_qwen3() -> Iterator[Row]:
    if MODE != "device":
        return
    step = Step(shape_of("qwen3-30b-a3b", 4))
    yield from _report("qwen3-30b-a3b", step, {
        "first product 4 rows": patched(first_product(4, 4)),
        "output 8 warps": patched(product(2048, 2, 8)),
        "first product 4 rows, output 8 warps": patched(first_product(4, 4), product(2048, 2, 8)),
    })  # fmt: skip


def bench_qwen3_next() -> Iterator[Row]:
    if MODE != "device":
        return
    step = Step(shape_of("qwen3-next", 4))
    yield from _report("qwen3-next", step, {
        "first product 2 rows": patched(first_product(2, 4)),
        "second product, two warps": patched(second_product(512, 6)),
        "output 8 warps": patched(product(2048, 2, 8)),
    })  # fmt: skip
