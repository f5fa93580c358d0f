"""Which prompts have their keys gathered on CUDA, and that the memory which takes is counted at start."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from penstock.engine.backends.backend import Backend
from penstock.engine.backends.cuda.long_prompts import (
    CAPTURED_CONTEXT,
    FP8_HEAD,
    LONG_CHUNK,
    Gathering,
    attends_in_fp8,
    check_fp8_attention,
    gathered_bytes,
    room_for_gathered,
)
from penstock.engine.backends.interface import AttentionBatch, HeadLayout, attended
from penstock.engine.models.families import read_config
from penstock.engine.startup import memory
from penstock.errors import ConfigError
from tests.engine.harness import make_engine
from tests.engine.tiny import write_checkpoint


class GatheringOps:
    """Stands for the ops of a device that gathers FP8 and 16 bits, but not float32."""

    def gathered_bytes(self, layout: HeadLayout, dtype: torch.dtype) -> int:
        return 4096 if dtype != torch.float32 else 0


def one_layer(path: Path, dtype: torch.dtype) -> Any:
    """A decoder that such a device runs, and its cache, of one layer each."""
    engine = make_engine(write_checkpoint("llama-gqa", path), num_blocks=4)
    layer, cache = engine.runner.decoder.layers[0], engine.runner.kv.layers[0]
    mixer = replace(cast(Any, layer.mixer), attention_ops=GatheringOps())
    decoder = SimpleNamespace(layers=[replace(layer, mixer=mixer)])
    return decoder, SimpleNamespace(layers=[replace(cast(Any, cache), k=cast(Any, cache).k.to(dtype))])


def chunks(*places: tuple[int, int]) -> Any:
    return [SimpleNamespace(start=start, length=length) for start, length in places]


def test_which_layers_have_their_keys_gathered(tmp_path: Path) -> None:
    engine = make_engine(write_checkpoint("llama-gqa", tmp_path), num_blocks=4)
    decoder, kv = engine.runner.decoder, engine.runner.kv
    assert gathered_bytes(decoder, kv) == 0
    layer: Any = decoder.layers[0]

    def taken(
        dtype: torch.dtype = torch.float8_e4m3fn, window: int | None = None, sinks: Any = None, context: int = 0
    ) -> int:
        heads = replace(layer.mixer.heads, window=window)
        mixer = replace(layer.mixer, attention_ops=GatheringOps(), heads=heads, sinks=sinks)
        cache = replace(kv.layers[0], k=kv.layers[0].k.to(dtype))
        other: Any = SimpleNamespace(layers=[replace(layer, mixer=mixer)])
        return gathered_bytes(other, SimpleNamespace(layers=[cache]), context)  # type: ignore[arg-type]

    assert taken() == taken(context=64) == 4096
    assert taken(torch.float32) == taken(sinks=torch.zeros(4)) == 0
    assert taken(window=64) == taken(window=64, context=64) == 4096, "contexts inside the window are gathered"
    assert taken(window=64, context=65) == 0


def test_captured_steps_have_room_for_keys_gathered_from_a_quantized_cache(tmp_path: Path) -> None:
    decoder, kv = one_layer(tmp_path / "q", torch.float8_e4m3fn)
    gathering = Gathering(decoder, kv)
    for start, want in ((CAPTURED_CONTEXT - 1000, math.inf), (CAPTURED_CONTEXT - 999, LONG_CHUNK - 1)):
        assert gathering.most_places(chunks((0, 400), (start, 600))) == want
    assert gathering.total_context(LONG_CHUNK, 8) == CAPTURED_CONTEXT + LONG_CHUNK + 8
    assert gathering.total_context(LONG_CHUNK - 1, 8) is None, "the portable kernel attends there"
    assert room_for_gathered(decoder, kv) == 8192, "captured steps have memory of their own"
    decoder, kv = one_layer(tmp_path / "n", torch.bfloat16)
    narrow = Gathering(decoder, kv)
    assert narrow.total_context(1024, 8) is None and narrow.most_places(chunks((90_000, 1000))) == math.inf
    assert room_for_gathered(decoder, kv) == 4096, "such chunks are read as they are where steps are captured"


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama-gqa", True),
        ("qwen3-moe", True),
        ("mistral-window", True),
        ("gemma2", False),  # caps scores
        ("gpt-oss", False),  # has sinks
        ("deepseek-v3", False),
        ("deepseek-v4", False),
        ("qwen4-exp", False),
        ("qwen3-next", True),  # attends in some layers
        ("granite4-hybrid", True),
        ("nemotron-h", True),
        ("falcon-h1", True),  # in every layer, beside Mamba
        ("lfm2", True),
        ("mamba2", False),  # in none, whatever the size of its heads
    ],
)
def test_which_models_attend_in_fp8(tmp_path: Path, family: str, expected: bool) -> None:
    model = read_config(json.loads((write_checkpoint(family, tmp_path) / "config.json").read_text()))
    model = replace(model, layer_heads=(), windows=(LONG_CHUNK,) * model.num_layers)
    assert attends_in_fp8(replace(model, head_dim=FP8_HEAD)) == expected
    assert not attends_in_fp8(replace(model, head_dim=64))


def test_a_model_attends_in_fp8_if_one_of_its_layers_does(tmp_path: Path) -> None:
    model = read_config(json.loads((write_checkpoint("minimax-m3", tmp_path) / "config.json").read_text()))
    assert model.sparse_blocks is not None and model.windows == (None,) * model.num_layers
    layers = (True,) * model.num_layers
    chooses = replace(model.sparse_blocks, layers=layers), replace(model.sparse_blocks, layers=(False, *layers[1:]))
    found = [attends_in_fp8(replace(model, head_dim=FP8_HEAD, sparse_blocks=blocks)) for blocks in chooses]
    assert found == [False, True]
    heads = ((2, 64),) * (model.num_layers - 1)
    assert attends_in_fp8(replace(model, sparse_blocks=None, layer_heads=(*heads, (2, FP8_HEAD))))
    assert not attends_in_fp8(replace(model, sparse_blocks=None, layer_heads=(*heads, (2, 256))))


def test_attention_in_fp8_is_refused_where_it_would_do_nothing(tmp_path: Path) -> None:
    model = read_config(json.loads((write_checkpoint("llama-gqa", tmp_path) / "config.json").read_text()))
    wide, fp8 = replace(model, head_dim=FP8_HEAD), torch.float8_e4m3fn
    for dtype in (torch.bfloat16, torch.float16):
        check_fp8_attention(wide, dtype, fp8, LONG_CHUNK)
    check_fp8_attention(replace(wide, windows=(64, None, LONG_CHUNK)), torch.bfloat16, fp8, LONG_CHUNK)
    short = replace(wide, windows=(64,) * wide.num_layers)
    for given, dtype, kv_dtype, chunk, reason in (
        (wide, torch.bfloat16, torch.int8, LONG_CHUNK, "set kv_dtype: fp8 too"),
        (wide, torch.float32, fp8, LONG_CHUNK, "for models in bfloat16 or float16"),
        (model, torch.bfloat16, fp8, LONG_CHUNK, "with heads of 128"),
        (wide, torch.bfloat16, fp8, LONG_CHUNK - 1, "no step has more than 511: raise token_budget or max_model_len"),
        (short, torch.bfloat16, fp8, LONG_CHUNK, "windows below 512 tokens"),
    ):
        with pytest.raises(ConfigError, match=reason):
            check_fp8_attention(given, dtype, kv_dtype, chunk)


def test_how_often_keys_are_read_is_counted_by_prompt() -> None:
    queries, contexts = [1, 1, 3, 4], [50, 9, 3, 10]
    starts = np.cumsum([0, *queries])
    assert attended(starts, np.array(contexts), 2) == (1 + 2 + 3) + (7 + 8 + 9 + 10)
    assert AttentionBatch.of_one(5, 16, torch.device("cpu")).attended == 15


def test_what_long_contexts_take_is_left_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(write_checkpoint("llama-gqa", tmp_path), num_blocks=4)
    decoder = engine.runner.decoder
    backend = engine.runner.executor._rows.backend  # type: ignore[attr-defined]
    arguments = backend, decoder, torch.float32, 64, 16
    before = memory._activation_bytes(*arguments)
    monkeypatch.setattr(Backend, "long_context_bytes", lambda *_: 1 << 28)
    assert memory._activation_bytes(*arguments) - before == 1 << 28
