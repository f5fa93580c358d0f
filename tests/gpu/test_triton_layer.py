"""A decoder layer of a few tokens as the engine runs it: six launches, in a CUDA graph, with and without dependent
launch. The bench says what a layer costs from end to end, gaps between kernels included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from attention_cases import BLOCK, FP8, Case, attention64, build, layout
from gpu_harness import DEVICE, MODE, Row, bandwidth, check, check_equal, poisoned_outputs, rand, time_us
from test_triton_elementwise import norm64, silu64
from test_triton_gemv import make_weight
from test_triton_rope import rope64
from torch import Tensor

from penstock.engine.backends.cuda.kernels.gemv import linear
from penstock.engine.backends.cuda.ops import TritonOps
from penstock.engine.backends.interface import HeadLayout

BF16 = torch.bfloat16
EPS = 1e-5


@dataclass
class Layer:
    """Weights of one layer; linears with their scales."""

    norms: tuple[Tensor, Tensor]
    qkv: tuple[Tensor, Tensor | None]
    output: tuple[Tensor, Tensor | None]
    gate_up: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]


def make_layer(hidden: int, ffn: int, heads: HeadLayout, dtype: torch.dtype) -> Layer:
    wide = (heads.heads + 2 * heads.kv_heads) * heads.head_dim
    return Layer(
        norms=(rand(hidden, dtype=BF16), rand(hidden, dtype=BF16)),
        qkv=make_weight(wide, hidden, dtype),
        output=make_weight(hidden, heads.heads * heads.head_dim, dtype),
        gate_up=make_weight(2 * ffn, hidden, dtype),
        down=make_weight(hidden, ffn, dtype),
    )


def run_layer(
    ops: TritonOps,
    layer: Layer,
    residual: Tensor,
    case: Case,
    cos_sin: Tensor,
    linear: Callable[..., Tensor] = linear,
) -> Tensor:
    """One layer, fused; `residual` is updated in place."""
    pdl, heads = ops.pdl, case.layout
    qkv = linear(residual, layer.qkv[0], weight_scale=layer.qkv[1], norm=layer.norms[0], eps=EPS, pdl=pdl)
    q = ops.rope_and_cache(qkv, heads, cos_sin, case.batch, case.k_cache, case.v_cache, None, None, EPS)
    x = ops.attention(q, heads, case.batch, case.k_cache, case.v_cache)
    linear(x, layer.output[0], weight_scale=layer.output[1], residual=residual, out=residual, pdl=pdl)
    x = linear(
        residual, layer.gate_up[0], weight_scale=layer.gate_up[1], norm=layer.norms[1], eps=EPS, gated=True, pdl=pdl
    )
    return linear(x, layer.down[0], weight_scale=layer.down[1], residual=residual, out=residual, pdl=pdl)


def layer64(layer: Layer, residual: Tensor, case: Case, cos_sin: Tensor) -> Tensor:
    def apply(x: Tensor, weight: tuple[Tensor, Tensor | None]) -> Tensor:
        wide = weight[0].float().double()
        return x @ (wide if weight[1] is None else wide * weight[1].double()[:, None]).T

    heads = case.layout
    qkv = apply(norm64(residual, layer.norms[0], EPS), layer.qkv)
    q, k, v = rope64(case, qkv, cos_sin, None, EPS)
    block, offset = case.batch.slots // BLOCK, case.batch.slots % BLOCK
    case.k_cache[block, :, offset] = k.to(case.k_cache.dtype)
    case.v_cache[block, :, offset] = v.to(case.v_cache.dtype)
    attended = attention64(Case(case.batch, heads, case.k_cache, case.v_cache, q, None, case.queries, case.contexts))
    residual = residual.double() + apply(attended, layer.output)
    return residual + apply(silu64(apply(norm64(residual, layer.norms[1], EPS), layer.gate_up)), layer.down)


def test_layer_with_and_without_dependent_launch() -> None:
    small = layout(4, 2, 32)
    for count in (1, 3):
        contexts = [40 + i for i in range(count)]
        case = build([1] * count, contexts, small, BF16)
        cos_sin = rand(64, 32)
        layers = [make_layer(64, 96, small, BF16) for _ in range(2)]
        start = rand(count, 64, dtype=BF16, scale=2)
        caches = [case.k_cache.clone(), case.v_cache.clone()]

        def restore(c: Case = case, saved: list[Tensor] = caches) -> None:
            c.k_cache.view(torch.uint8).copy_(saved[0].view(torch.uint8))
            c.v_cache.view(torch.uint8).copy_(saved[1].view(torch.uint8))

        results = []
        for pdl in (False, True) if MODE != "interpret" else (False,):
            ops = TritonOps(DEVICE, pdl=pdl)
            restore()
            residual = start.clone()
            with poisoned_outputs():
                for layer in layers:
                    run_layer(ops, layer, residual, case, cos_sin)
            results.append(residual)
        if MODE == "compile":
            continue
        restore()
        want = start
        for layer in layers:
            want = layer64(layer, want, case, cos_sin)
        check(f"layers of {count}", results[0], want, 2e-2)
        if len(results) > 1:
            check_equal(f"dependent launch, {count}", results[1], results[0])


def test_graph_replay_with_new_contents() -> None:
    """A graph captured for one set of lengths and rows serves any other."""
    if MODE != "device":
        return
    heads = layout(32, 8, 128)
    captured = build([1] * 6, [700] * 6, heads, BF16, max_context=8192)
    for pdl in (False, True):
        ops = TritonOps(DEVICE, pdl=pdl)

        def step(c: Case = captured, o: TritonOps = ops) -> Tensor:
            return o.attention(c.q, c.layout, c.batch, c.k_cache, c.v_cache)

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        for contexts in ([3, 700, 20, 1, 90, 333], [699, 1, 5, 600, 16, 17], [1] * 6):
            other = build([1] * 6, contexts, heads, BF16, max_context=8192)
            captured.k_cache[: len(other.k_cache)] = other.k_cache
            captured.v_cache[: len(other.v_cache)] = other.v_cache
            captured.batch.block_tables[:, : other.batch.block_tables.shape[1]] = other.batch.block_tables
            captured.batch.rows.copy_(other.batch.rows)
            captured.batch.context_lens.copy_(other.batch.context_lens)
            captured.q.copy_(other.q)
            out.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            check(f"replay {contexts} pdl={pdl}", out, attention64(other))


def bench_layer() -> Iterator[Row]:
    shapes = {
        "llama-8b": (4096, 14336, layout(32, 8, 128), 6),
        "qwen3-0.6b": (1024, 3072, layout(16, 8, 128), 24),
    }
    for name, (hidden, ffn, heads, copies) in shapes.items():
        for dtype, label in ((BF16, "bf16"), (FP8, "fp8")):
            layers = [make_layer(hidden, ffn, heads, dtype) for _ in range(copies)]
            size = sum(w[0].numel() * w[0].element_size() for w in vars(layers[0]).values() if w is not layers[0].norms)
            for count in (1, 8):
                case = build([1] * count, [300] * count, heads, BF16, max_context=8192)
                cos_sin, residual = rand(1024, heads.head_dim), rand(count, hidden, dtype=BF16)
                for pdl in (False, True):
                    ops = TritonOps(DEVICE, pdl=pdl)
                    us = time_us(
                        [lambda o=ops, x=x, r=residual, c=case, t=cos_sin: run_layer(o, x, r, c, t) for x in layers]
                    )
                    yield bandwidth(f"layer {name} {label} b{count}{' dependent' if pdl else ''}", us, size)
            del layers
