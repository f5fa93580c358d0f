"""A step of one token through layers of experts that are in chains of products: the hidden states of separate launches,
and what a layer takes of both, beside reading its weights."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from gpu_harness import DEVICE, MODE, Row, check, integers, rand, time_us
from test_triton_chained_step import _early, _shape, offered
from test_triton_latent import BLOCK, OnTriton, make_batch
from test_triton_one_token import shape_of

from penstock.bench.bounds import probe
from penstock.engine.backends.cuda.kernels import common
from penstock.engine.backends.cuda.kernels.chain_plan import ChainShape, plan_chain
from penstock.engine.backends.cuda.mxfp4_linear import Mxfp4Quantizer
from penstock.engine.backends.cuda.ops import TritonOps
from penstock.engine.backends.cuda.trials import ONE_TOKEN
from penstock.engine.backends.interface import StateBatch
from penstock.engine.kv.cache import KVCache
from penstock.engine.loading.random_checkpoint import RandomCheckpoint
from penstock.engine.models.build import build_decoder
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.families import read_config

BF16 = torch.bfloat16
SHAPES = {"qwen3-30b-a3b": 4, "deepseek-v2-lite": 4, "qwen3-next": 4, "gpt-oss-20b": 4}
"""Layers of a step; the first one of `deepseek-v2-lite` has no experts."""


class Step:
    """One token after 300 others."""

    def __init__(self, name: str, layers: int) -> None:
        config = shape_of(name, layers)
        factory = OnTriton()
        factory.ops = TritonOps(DEVICE)
        factory.ops.chains = True
        weights = RandomCheckpoint(config, dtype=BF16, device=DEVICE)
        self.chained: Decoder = build_decoder(
            weights, read_config(config), factory, dtype=BF16, max_positions=4096, fused_up_to=8,
            quantize=Mxfp4Quantizer(DEVICE, None) if name.startswith("gpt-oss") else None,
        )  # fmt: skip
        self.usual = dataclasses.replace(self.chained, chains=False)
        batch, blocks = make_batch([300], [])
        ones, zeros = integers([1], torch.int32), integers([0], torch.int32)
        self.batch = dataclasses.replace(batch, states=StateBatch(zeros, zeros, ones, ones))
        self.kv = KVCache(self.chained.cache_shape(BLOCK, BF16), blocks, DEVICE, num_states=2)
        self._held = [*self.kv.tensors, *self.kv.states]
        self._begun = [rand(*tensor.shape).to(tensor.dtype) for tensor in self._held]
        self.residual = rand(1, self.chained.config.hidden_size, dtype=BF16)
        self.read = sum(self._read(layer) for layer in self.chained.layers)

    def _read(self, layer: Any) -> int:
        """Bytes of the weights that one token reads."""
        routed = getattr(layer.feed_forward, "routed", layer.feed_forward)
        read: int = layer.mixer.weight_bytes + layer.feed_forward.weight_bytes
        if hasattr(routed, "choice"):
            count, visited = routed.gate_up.experts, routed.choice.top_k
            read -= (routed.gate_up.weight_bytes + routed.down.weight_bytes) * (count - visited) // count
        return read

    def reset(self) -> None:
        """States of delta nets are changed by a step."""
        for tensor, begun in zip(self._held, self._begun, strict=True):
            tensor.copy_(begun)

    def __call__(self, decoder: Decoder) -> torch.Tensor:
        return decoder.run(self.residual.clone(), self.batch, self.kv)


SMALL: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_experts": 4,
        "num_experts_per_tok": 4, "moe_intermediate_size": 64,
    },
    "deepseek-v2-lite": {
        "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 4,
        "num_experts_per_tok": 4, "moe_intermediate_size": 64, "intermediate_size": 96,
    },
    "qwen3-next": {
        "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_experts": 4,
        "num_experts_per_tok": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 48,
    },
    "gpt-oss-20b": {
        "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_local_experts": 4,
        "num_experts_per_tok": 4, "intermediate_size": 64,
    },
}  # fmt: skip
"""Every expert is visited, so that near-ties of scores change nothing."""


def test_links_are_what_is_launched() -> None:
    """Of a layer's experts: what a chain is given, computed in PyTorch, beside their own launches."""
    if MODE == "compile":
        return
    for name, changes in SMALL.items():
        config = {**shape_of(name, 2), **changes, "vocab_size": 64}
        packed, factory = name.startswith("gpt-oss"), OnTriton()
        factory.ops = TritonOps(DEVICE)
        factory.ops.chains = True
        decoder = build_decoder(
            RandomCheckpoint(config, dtype=BF16, device=DEVICE), read_config(config), factory, dtype=BF16,
            max_positions=64, fused_up_to=8, quantize=Mxfp4Quantizer(DEVICE, None) if packed else None,
        )  # fmt: skip
        layer, eps = decoder.layers[-1], decoder.config.rms_eps
        feed_forward: Any = layer.feed_forward
        (link,) = feed_forward.links(layer.feed_forward_norm, eps)
        output, entry = layer.mixer.output.link(residual=True), layer.mixer.entry.link(norm=layer.mixer_norm, eps=eps)  # type: ignore[attr-defined]
        assert plan_chain([output, link, entry], ChainShape(132, 4)) is not None, name
        if packed:
            assert link.clamped is not None and link.gate_up_bias is not None and link.down_bias is not None
            assert feed_forward.links(layer.feed_forward_norm, eps)[0].gate_up is link.gate_up  # made once
            factory.ops.chains = False
            assert not feed_forward.links(layer.feed_forward_norm, eps)
            continue
        residual = rand(1, config["hidden_size"], dtype=BF16)
        got = residual.clone()
        link.apply(got, BF16)
        want = feed_forward.fused(residual.clone(), layer.feed_forward_norm, eps)
        check(f"{name}, what experts add", got.float() - residual.float(), want.float() - residual.float(), 3e-2)


def test_nothing_is_prepared_where_no_chain_runs() -> None:
    """Experts in MXFP4 take their memory twice for chains: not on a device that has none, whatever is asked for."""
    for value, expected in (("launches", False), ("chain", offered())):
        with patch.dict(os.environ, {ONE_TOKEN: value}):
            assert TritonOps(DEVICE).chains is expected


def _build(step: Step, early: bool) -> None:
    """All kernels at once: one after another takes seconds each."""
    with _early(early), common.building_kernels(), torch.inference_mode():
        step(step.chained)
        step(step.usual)


def _check_hidden_states(name: str) -> None:
    """They equal those of separate launches. Scores are rounded sums in another order: where two experts are as good as
    equal, the two paths may choose differently, in perhaps a quarter of the steps. So every input has to be near, and
    one of twenty very near, beside what all layers have added."""
    if MODE != "device" or not offered():
        return
    step = Step(name, SHAPES[name])
    assert step.chained.chained and not step.usual.chained
    assert all(boundary.chain is not None for boundary in step.chained.boundaries)  # type: ignore[attr-defined]
    for early in (False, True):
        _build(step, early)
        apart = [_difference(step, early) for _ in range(20)]
        assert max(apart) < 0.5 and min(apart) < 0.03, (name, early, apart)


# One test for each: building the kernels of all of them may take longer than a test has (`run.PATIENCE_S`).
def test_hidden_states_of_qwen3_30b() -> None:
    _check_hidden_states("qwen3-30b-a3b")


def test_hidden_states_of_deepseek_lite() -> None:
    _check_hidden_states("deepseek-v2-lite")


def test_hidden_states_of_qwen3_next() -> None:
    _check_hidden_states("qwen3-next")


def test_hidden_states_of_gpt_oss() -> None:
    _check_hidden_states("gpt-oss-20b")


def _difference(step: Step, early: bool) -> float:
    """Of both paths for another input, as a share of what the layers have added to it."""
    config = step.chained.config
    step.residual = rand(1, config.hidden_size, dtype=BF16)
    found = []
    for decoder in (step.chained, step.usual):
        step.reset()
        with _early(early):
            found.append(step(decoder).float())
    plain = step.usual.ops.rms_norm(step.residual, step.usual.final_norm, config.rms_eps).float()
    return float((found[0] - found[1]).norm() / (found[1] - plain).norm())


def bench_layers_of_experts() -> Iterator[Row]:
    """Microseconds of a layer with attention, and their share of what reading its weights takes."""
    if MODE != "device" or not offered():
        return
    bound = probe(torch.device("cuda", 0), BF16).read_gbps
    for name, layers in SHAPES.items():
        step = Step(name, layers)

        def row(kind: str, us: float, name: str = name, step: Step = step, layers: int = layers) -> Row:
            share = step.read / layers / bound / us / 10 if us else 0
            return f"{name}, a layer, {kind}", us, f"{share:.0f}% of the read bound"

        _build(step, True)
        with _early(True):
            yield row("separate", time_us([lambda step=step: step(step.usual)]) / layers)
            yield row("in chains", time_us([lambda step=step: step(step.chained)]) / layers)
        for changes in ({"stages": 3}, {"stages": 5}, {"registers": 80}, {"warps": 8, "stages": 8}, {"tensor": False}):
            with _shape(**changes):
                other = dataclasses.replace(step.chained)
            if not other.chained:
                continue  # no room for it
            with _early(True), common.building_kernels(), torch.inference_mode():
                step(other)
            with _early(True):
                yield row(f"{changes}", time_us([lambda step=step, other=other: step(other)]) / layers)
        with _early(True):
            yield row("separate again", time_us([lambda step=step: step(step.usual)]) / layers)
        del step
