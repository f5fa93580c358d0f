"""What adapters cost on CUDA: the linears of an 8B layer with and without them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attention_cases import build
from attention_cases import layout as heads_of
from gpu_harness import DEVICE, MODE, Row, bandwidth, rand, time_us
from test_triton_gemv import make_weight
from test_triton_lora import LLAMA, adapter, use
from test_triton_moe import make_moe

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from penstock.engine.adapters.apply import FusedAdaptedLinear  # noqa: E402
from penstock.engine.adapters.experts import AdaptedExperts  # noqa: E402
from penstock.engine.adapters.layout import AdapterLayout, Site  # noqa: E402
from penstock.engine.backends.cuda import lora as lora_module  # noqa: E402
from penstock.engine.backends.cuda.experts import group  # noqa: E402
from penstock.engine.backends.cuda.kernels import common, gemv  # noqa: E402
from penstock.engine.backends.cuda.kernels.norm import rms_norm  # noqa: E402
from penstock.engine.backends.cuda.kernels.norm_shrink import rms_norm_shrink  # noqa: E402
from penstock.engine.backends.cuda.linear import CudaLinear  # noqa: E402
from penstock.engine.backends.cuda.lora import TritonLora  # noqa: E402
from penstock.engine.backends.cuda.ops import TritonOps  # noqa: E402


class _Plain(CudaLinear):
    def __call__(self, x: Any) -> torch.Tensor:
        if MODE == "compile":  # the vendor's product is slow on a CPU, and nothing to compile
            return torch.empty((x.shape[0], self.weight.shape[0]), dtype=x.dtype)
        return super().__call__(x)


class Stack:
    """Several 8B layers, attention left out: their linears with and without adapters, and what stands between."""

    def __init__(self, layers: int = 1 if MODE == "compile" else 8) -> None:
        self.dtype, self.eps = torch.bfloat16, 1e-5
        self.layout = AdapterLayout(LLAMA.sites, layers, by_output=True)
        self.ops, self.heads, self.cos_sin = TritonOps(DEVICE), heads_of(32, 8, 128), rand(64, 128)
        self.linears = [
            [_Plain(make_weight(site.outputs, site.inputs, self.dtype)[0], None) for site in LLAMA.sites]
            for _ in range(layers)
        ]
        self.gain = rand(4096, dtype=self.dtype)

    def adapters(
        self,
        tokens: int,
        count: int,
        sites: Sequence[int] = range(4),
        parts: int = 7,
        kind: type[TritonLora] = TritonLora,
    ) -> TritonLora:
        """`count` adapters of rank 16 on these sites, and these parts of query, key and value, the tokens' in turn."""
        lora = kind(self.layout, count, 16, self.dtype, DEVICE)
        touched = torch.tensor([parts, 1, 3, 1], dtype=torch.int32)
        loaded = dataclasses.replace(adapter(self.layout, 16, self.dtype), parts=touched)
        for site in range(4):
            if site not in sites:
                loaded.ranks[site] = 0
        for slot in range(count):
            lora.put(slot, loaded)
        use(lora, np.arange(tokens, dtype=np.int32) % count, tokens)
        return lora

    def adapted(self, lora: TritonLora, sites: int = 4) -> list[list[Any]]:
        return [
            [
                FusedAdaptedLinear(linear, lora, self.layout.place(i, j)) if j < sites else linear
                for j, linear in enumerate(layer)
            ]
            for i, layer in enumerate(self.linears)
        ]

    def pass_of(
        self, tokens: int, layers: list[list[Any]], lora: TritonLora | None, most_fused: int = 8
    ) -> Callable[[], None]:
        case, residual = (
            build([1] * tokens, [20] * tokens, self.heads, self.dtype),
            rand(tokens, 4096, dtype=self.dtype),
        )
        ops, gain, eps = self.ops, self.gain, self.eps

        def rope(x: Any) -> torch.Tensor:
            q = ops.rope_and_cache(x, self.heads, self.cos_sin, case.batch, case.k_cache, case.v_cache, None, None, eps)
            return q.flatten(1)

        def few() -> None:
            for qkv, output, gate_up, down in layers:
                x = rope(qkv.fused(residual, norm=gain, eps=eps))
                output.fused(x, residual=residual)
                down.fused(gate_up.fused(residual, norm=gain, eps=eps, gated=True), residual=residual)

        def many() -> None:
            x = ops.rms_norm(residual, gain, eps)
            for qkv, output, gate_up, down in layers:
                x = ops.add_rms_norm(output(rope(qkv(x))), residual, gain, eps)
                x = ops.add_rms_norm(down(ops.silu_mul(gate_up(x))), residual, gain, eps)

        def step() -> None:
            if lora is not None:
                lora._begin(lora._step)  # a pass begins
            (few if tokens <= most_fused else many)()

        return step


@contextlib.contextmanager
def overlapping() -> Iterator[None]:
    """Kernels start early, as they do in the engine."""
    common.overlap_launches(True)
    try:
        yield
    finally:
        common.overlap_launches(False)


def bench_lora_layer() -> Iterator[Row]:
    """The linears of an 8B layer and what stands between them, attention left out, with and without adapters."""
    with overlapping():
        yield from _layers_with_and_without()


def _layers_with_and_without() -> Iterator[Row]:
    stack = Stack()
    layers = stack.layout.layers
    for tokens, counts in ((1, (1,)), (8, (1, 8)), (64, (1, 20))):
        plain = 0.0
        if MODE != "compile":  # not the vendor's product, on a CPU
            plain = time_us([stack.pass_of(tokens, stack.linears, None)]) / layers
            yield f"8B layer, {tokens} tokens: without", plain, ""
            if tokens == 8:
                chosen, gemv.vendor_wins = gemv.vendor_wins, lambda *_: False
                own = time_us([stack.pass_of(tokens, stack.linears, None)]) / layers
                gemv.vendor_wins = chosen
                yield f"8B layer, {tokens} tokens: without, by our own products", own, f"{own - plain:+.1f} us"
        for wide, count in itertools.product((True, False), counts):
            lora, name = stack.adapters(tokens, count, parts=7 if wide else 5), "every linear" if wide else "q and v"
            mixed = time_us([stack.pass_of(tokens, stack.adapted(lora, 4 if wide else 1), lora)]) / layers
            ratio = f"{mixed - plain:+.1f} us, {mixed / plain:.3f}x" if plain else "-"
            yield f"8B layer, {tokens} tokens: {count} adapters, {name}", mixed, ratio


def tune_lora_ways() -> Iterator[Row]:
    """Decode steps of more tokens than fit into a linear's launch, over launch shapes."""
    stack = Stack()
    layers = stack.layout.layers
    shapes = {
        "as chosen": (lora_module.input_shares, lora_module.columns_at_once),
        "16 shares": (lambda inputs: max(1, min(16, inputs // 512)), lora_module.columns_at_once),
        "64 columns": (lora_module.input_shares, lambda outputs: 64 if outputs <= 8192 else 128),
        "256 columns": (lora_module.input_shares, lambda outputs: 256),
    }
    tokens = 64
    plain = time_us([stack.pass_of(tokens, stack.linears, None)]) / layers if MODE != "compile" else 0.0
    yield f"8B layer, {tokens} tokens: without", plain, ""
    for shape, (shares, columns) in shapes.items():
        for count, wide in ((1, True), (20, False), (20, True)):
            kept = lora_module.input_shares, lora_module.columns_at_once
            lora_module.input_shares, lora_module.columns_at_once = shares, columns
            try:
                lora = stack.adapters(tokens, count, parts=7 if wide else 5)
                mixed = time_us([stack.pass_of(tokens, stack.adapted(lora, 4 if wide else 1), lora)]) / layers
            finally:
                lora_module.input_shares, lora_module.columns_at_once = kept
            ratio = f"{mixed - plain:+.1f} us, {mixed / plain:.3f}x" if plain else "-"
            on = "every linear" if wide else "q and v"
            yield f"{tokens} tokens, {count} adapters on {on}: {shape}", mixed, ratio


def tune_lora_rows() -> Iterator[Row]:
    """Each linear of a single token with and without its adapter, over launch shapes."""
    with overlapping():
        yield from _rows_over_shapes()


def _rows_over_shapes() -> Iterator[Row]:
    stack = Stack()
    lora = stack.adapters(1, 1)
    adapted, chosen = stack.adapted(lora), gemv.choose
    x, layers = rand(1, 4096, dtype=stack.dtype), stack.layout.layers
    plain = time_us([lambda: [rms_norm(x, stack.gain, stack.eps) for _ in range(layers)]]) / layers
    for index in (0, 2):

        def shrinks(index: int = index) -> None:
            lora._begin(lora._step)
            for i in range(layers):
                rms_norm_shrink(x, stack.gain, stack.eps, lora.inline(stack.layout.place(i, index)))

        us = time_us([shrinks]) / layers
        yield f"norm with products, {LLAMA.sites[index].attribute}", us, f"{us - plain:+.2f} us"
    for index, site in enumerate(LLAMA.sites):
        x, residual = rand(1, site.inputs, dtype=stack.dtype), rand(1, 4096, dtype=stack.dtype)
        folded: dict[str, Any] = {"gated": site.attribute == "gate_up"}
        folded |= {"norm": stack.gain, "eps": stack.eps} if index in (0, 2) else {"residual": residual}
        for shape in SHAPES[site.attribute]:
            config = gemv.GemvConfig("rows", shape[0], shape[1] * 256, shape[1], 1)
            gemv.choose = lambda *_, config=config: config
            try:
                times = []
                for side in (stack.linears, adapted):

                    def call(at: int, x: torch.Tensor, folded: dict[str, Any], side: Any = side) -> None:
                        if side is adapted:
                            lora._begin(lora._step)
                        for layer in side:
                            layer[at].fused(x, **folded)

                    times.append(time_us([partial(call, index, x, folded)]) / layers)
            finally:
                gemv.choose = chosen
            yield f"{site.attribute} {shape}", times[0], f"with its adapter {times[1] - times[0]:+.2f} us"


SHAPES = {
    "qkv": [(1, 8), (2, 8), (4, 4)],
    "output": [(1, 8), (2, 8), (4, 8), (2, 4), (4, 4)],
    "gate_up": [(1, 8), (2, 8), (2, 4), (4, 4)],
    "down": [(4, 4), (2, 4), (4, 8), (2, 2), (4, 2)],
}


def bench_lora() -> Iterator[Row]:
    """All four sites of one 8B layer: what adapters add to it."""
    dtype = torch.bfloat16
    for rank, count, tokens in ((16, 1, 1), (16, 8, 8), (16, 20, 64), (16, 1, 64), (64, 20, 64), (16, 20, 256), (16, 4, 4096)):  # fmt: skip  # noqa: E501
        ours = TritonLora(LLAMA, count, rank, dtype, DEVICE)
        for slot in range(count):
            ours.put(slot, adapter(LLAMA, rank, dtype))
        ours.begin(np.arange(tokens, dtype=np.int32) % count)
        pairs = [
            (rand(tokens, site.inputs, dtype=dtype), rand(tokens, site.outputs, dtype=dtype)) for site in LLAMA.sites
        ]

        def layer(ours: TritonLora = ours, pairs: list[tuple[torch.Tensor, torch.Tensor]] = pairs) -> None:
            for index, (x, y) in enumerate(pairs):
                ours.add(x, y, LLAMA.place(0, index))

        us = time_us([layer])
        yield bandwidth(
            f"lora 8B layer: rank {rank}, {count} adapters, {tokens} tokens", us, 2 * count * rank * LLAMA.unit
        )


def bench_adapters_of_experts() -> Iterator[Row]:
    """A layer of experts as in Qwen3-30B-A3B, alone and with an adapter on every visit."""
    experts, top_k, hidden, ffn, rank, dtype = 128, 8, 2048, 768, 16, torch.bfloat16
    layout = AdapterLayout(
        (
            Site("expert_gate_up", ("g", "u"), (ffn, ffn), hidden, further=True, experts=experts, layers=(True,)),
            Site("expert_down", ("d",), (hidden,), ffn, further=True, experts=experts, layers=(True,)),
        ),
        1,
        by_output=True,
    )
    grouped = group(make_moe(experts, top_k, hidden, ffn, dtype))
    assert grouped is not None
    for tokens, count in ((1, 1), (8, 1), (8, 2), (64, 2), (2048, 2)):
        ours = TritonLora(layout, count, rank, dtype, DEVICE)
        for slot in range(count):
            ours.put(slot, adapter(layout, rank, dtype))
        ours.begin(np.arange(tokens, dtype=np.int32) % count)
        adapted = AdaptedExperts(grouped, ours, layout.place(0, 0), layout.place(0, 1))
        x = rand(tokens, hidden, dtype=dtype)
        plain = time_us([lambda x=x: grouped.forward(x)])
        mixed = time_us([lambda x=x, adapted=adapted: adapted.forward(x)])
        ratio = f"{mixed - plain:+.1f} us, {mixed / plain:.2f}x" if plain else "-"
        yield f"experts, {tokens} tokens: {count} adapters of rank {rank}", mixed, ratio
