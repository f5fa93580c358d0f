"""Which prompts have their keys gathered on CUDA, and that the memory which takes is counted at start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.engine.backends.backend import Backend
from penstock.engine.backends.cuda.long_prompts import LONG_CHUNK, LONG_CONTEXT, gathered_bytes, is_long
from penstock.engine.backends.interface import HeadLayout
from penstock.engine.startup import memory
from tests.engine.harness import make_engine
from tests.engine.tiny import write_checkpoint


class Gathering:
    """Stands for the ops of a device that gathers FP8."""

    def gathered_bytes(self, layout: HeadLayout, dtype: torch.dtype) -> int:
        return 4096 if dtype == torch.float8_e4m3fn else 0


def test_which_layers_have_their_keys_gathered(tmp_path: Path) -> None:
    engine = make_engine(write_checkpoint("llama-gqa", tmp_path), num_blocks=4)
    decoder, kv = engine.runner.decoder, engine.runner.kv
    assert gathered_bytes(decoder, kv) == 0
    layer: Any = decoder.layers[0]

    def taken(
        dtype: torch.dtype = torch.float8_e4m3fn, window: int | None = None, sinks: Any = None, context: int = 0
    ) -> int:
        heads = replace(layer.mixer.heads, window=window)
        mixer = replace(layer.mixer, attention_ops=Gathering(), heads=heads, sinks=sinks)
        cache = replace(kv.layers[0], k=kv.layers[0].k.to(dtype))
        other: Any = SimpleNamespace(layers=[replace(layer, mixer=mixer)])
        return gathered_bytes(other, SimpleNamespace(layers=[cache]), context)  # type: ignore[arg-type]

    assert taken() == taken(context=64) == 4096
    assert taken(torch.bfloat16) == taken(sinks=torch.zeros(4)) == 0
    assert taken(window=64) == taken(window=64, context=64) == 4096, "contexts inside the window are gathered"
    assert taken(window=64, context=65) == 0


def test_only_long_chunks_over_long_contexts_are_long() -> None:
    for start, length, want in (
        (LONG_CONTEXT - LONG_CHUNK, LONG_CHUNK, True),
        (LONG_CONTEXT - LONG_CHUNK - 1, LONG_CHUNK, False),
        (LONG_CONTEXT, LONG_CHUNK - 1, False),
        (0, LONG_CONTEXT, True),
    ):
        chunk: Any = SimpleNamespace(start=start, length=length)
        assert is_long(chunk) == want


def test_what_long_contexts_take_is_left_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(write_checkpoint("llama-gqa", tmp_path), num_blocks=4)
    decoder = engine.runner.decoder
    backend = engine.runner.executor._rows.backend  # type: ignore[attr-defined]
    arguments = backend, decoder, torch.float32, 64, 16
    before = memory._activation_bytes(*arguments)
    monkeypatch.setattr(Backend, "long_context_bytes", lambda *_: 1 << 28)
    assert memory._activation_bytes(*arguments) - before == 1 << 28
