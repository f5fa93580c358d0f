"""Mixers of one token with the norm before them and the residual behind them in their linears."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.backends import cpu
from penstock.engine.backends.interface import AttentionBatch
from penstock.engine.backends.reference.linear import DenseLinear
from penstock.engine.models.layers.composed import StackedLinear
from penstock.engine.models.layers.delta_net import ChannelDeltaNet, GatedDeltaNet
from penstock.engine.models.layers.gated_attention import GatedAttention
from penstock.engine.models.layers.latent_attention import LatentAttention
from penstock.engine.runner.eager import EagerExecutor
from tests.engine.harness import make_engine
from tests.engine.tiny import write_checkpoint


@pytest.mark.parametrize(
    ("family", "kinds"),
    [("qwen3-next-dense", {GatedDeltaNet, GatedAttention}), ("kimi-linear", {ChannelDeltaNet, LatentAttention})],
)
@pytest.mark.parametrize("apart", [False, True])
def test_gated_mixers_give_what_they_give_in_separate_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, kinds: set[type], apart: bool
) -> None:
    monkeypatch.setattr(cpu, "load", lambda threads: None)
    engine = make_engine(write_checkpoint(family, tmp_path), num_blocks=20)
    executor = engine.runner.executor
    assert isinstance(executor, EagerExecutor)
    decoder, kv, seen = executor._decoder, executor._kv, set()
    batch = AttentionBatch.of_one(1, kv.block_size, torch.device("cpu"))
    for layer, cache in zip(decoder.layers, kv.layers, strict=True):
        mixer: Any = layer.mixer
        inputs = {LatentAttention: "inputs", GatedAttention: "qkv"}.get(type(mixer), "mix")
        names = (inputs, "output")
        fused = replace(mixer, **{name: StackedLinear([getattr(mixer, name)]) for name in names})
        if apart and isinstance(mixer, GatedDeltaNet):
            layout, weight = mixer.layout, mixer.mix(torch.eye(decoder.embedding.shape[1])).T
            width = layout.channels if isinstance(mixer, ChannelDeltaNet) else layout.width
            mix, gates = (StackedLinear([DenseLinear(part, None)]) for part in (weight[:width], weight[width:]))
            fused = replace(fused, mix=mix, gates=gates)
        residual = torch.randn(1, decoder.embedding.shape[1])
        normed = decoder.ops.rms_norm(residual, layer.mixer_norm, 1e-6)
        want = residual + mixer.forward(normed, batch, cache)
        got = fused.fused(residual.clone(), layer.mixer_norm, 1e-6, batch, cache)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        seen.add(type(mixer))
    assert seen == kinds
