"""Gemma 4: what its attention does natively, configurations as they are published, the decoder inside of models that
take images, caches of layers of two kinds on several ranks, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from penstock.engine.backends.cpu.ops import CpuOps
from penstock.engine.backends.interface import INT8, SCALE_DTYPE, HeadLayout
from penstock.engine.backends.reference.ops import ReferenceOps
from penstock.engine.kv.kinds import OfLayer, PagedKV
from penstock.engine.models.families import read_config
from penstock.engine.parallel.layout import check_layout
from penstock.errors import CheckpointError
from tests.engine.backends.test_cpu_ops import close, make_batch
from tests.engine.harness import generate, greedy, make_engine
from tests.engine.models.test_transformers_handover import check
from tests.engine.tiny import COMMON, FAMILIES, write_checkpoint

PROMPT = [29 * i % 199 for i in range(70)]
HEADS, KV_HEADS, DIM = 6, 2, 44
"""A head that is no multiple of a vector."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_engine(write_checkpoint("gemma4-small", tmp_path_factory.mktemp("small")), threads=2)


@pytest.mark.parametrize("shared", ["", "values", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_dtype", ["same", "int8"])
def test_values_are_normalized_natively(engine: Any, shared: Any, dtype: torch.dtype, kv_dtype: str) -> None:
    """And made of keys as they are projected, or left to another layer."""
    torch.manual_seed(3)
    native: CpuOps = engine.runner.decoder.ops
    for normed in (False, True):
        layout = HeadLayout(HEADS, KV_HEADS, DIM, 1.0, normed_values=normed, shared=shared)
        batch, blocks = make_batch([(40, 1), (7, 7), (30, 20)], 16, seed=1)
        qkv = torch.randn(len(batch.positions), layout.rows * DIM).to(dtype)
        angles = torch.rand(64, DIM // 2) * 6
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
        q_norm, k_norm = (torch.rand(DIM).to(dtype) + 0.5 for _ in range(2))
        found = []
        for ops in (ReferenceOps(), native):
            cache = torch.full((2, blocks, KV_HEADS, 16, DIM), 7, dtype=dtype if kv_dtype == "same" else INT8)
            scales = torch.zeros(2, blocks, KV_HEADS, 16, dtype=SCALE_DTYPE)
            given = None if kv_dtype == "same" else (scales[0], scales[1])
            norms = q_norm, None if shared == "both" else k_norm
            q = ops.rope_and_cache(qkv.clone(), layout, cos_sin, batch, *cache, *norms, 1e-6, given)
            found.append((q.clone(), cache.float() * (scales.float().unsqueeze(-1) if given else 1.0)))
        (want_q, want), (got_q, got) = found
        close(got_q, want_q, dtype)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=6e-2 if kv_dtype == "int8" else 1e-2)
        assert shared != "both" or bool((got == (7 if kv_dtype == "same" else 0)).all()), "nothing is stored"


def published(**changes: Any) -> dict[str, Any]:
    """Of the 31B, as far as its shape goes."""
    return {
        "model_type": "gemma4_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 12,
        "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256, "global_head_dim": 512,
        "num_global_key_value_heads": 4, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
        "sliding_window": 1024, "final_logit_softcapping": 30.0, "max_position_embeddings": 262144,
        "use_bidirectional_attention": "vision", **changes,
    }  # fmt: skip


SMALL = {
    "num_kv_shared_layers": 4, "hidden_size_per_layer_input": 256, "use_double_wide_mlp": True,
    "attention_k_eq_v": False,
}  # fmt: skip


def test_published_configurations() -> None:
    large = read_config(published())
    assert large.windows == ((1024,) * 5 + (None,)) * 2
    assert large.layer_heads == (((16, 256),) * 5 + ((4, 512),)) * 2
    assert [large.shares(layer) for layer in (4, 5)] == ["", "values"]
    assert (large.attention_scale, large.logit_softcap, large.tied_embeddings) == (1.0, 30.0, True)
    full, local = large.ropes[5], large.ropes[0]
    assert (full.kind, full.rotated, full.theta) == ("proportional", 0.25, 1e6)
    assert (local.kind, local.theta) == ("default", 1e4)
    small = read_config(published(**SMALL))
    assert small.key_sources == (0, 1, 2, 3, 4, 5, 6, 7, 7, 7, 7, 5)
    assert small.layer_heads[5] == (16, 512), "without keys as values the number of KV heads is that of all layers"
    assert small.ffn_sizes == (21504,) * 8 + (43008,) * 4
    assert small.token_inputs is not None and small.token_inputs.size == 256
    unified = read_config({**published(), "model_type": "gemma4_unified_text"})
    assert dataclasses.replace(unified, family="gemma4_text") == large


def test_what_cannot_be_run_is_refused() -> None:
    for changes, message in (
        ({"layer_types": ["sliding_attention"] * 12}, "the last layer"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"per_layer_config": {"1": {"head_dim": 64}}}, "layers of one kind that differ"),
        ({"per_layer_config": {"1": {"hidden_size": 64}}}, "by number of layer"),
        ({"rope_parameters": {"full_attention": {}}}, "sliding_attention"),
        ({"num_kv_shared_layers": 12}, "no layer of its kind"),
        ({**SMALL, "vocab_size_per_layer_input": 100}, "cannot be looked up"),
        ({"num_global_key_value_heads": 5}, "32 heads over 5 KV heads"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read_config(published(**changes))
    check_layout(read_config(published()), 4, 2)


def test_layers_that_share_keys_keep_nothing(engine: Any) -> None:
    kinds = engine.runner.kv.shape.kinds
    assert [type(kind) for kind in kinds] == [PagedKV] * 3 + [OfLayer] * 3
    layers = engine.runner.kv.layers
    assert layers[3] is layers[4] is layers[2] and layers[5] is layers[1]


@pytest.mark.parametrize("wrapper", ["gemma4", "gemma4_unified"])
def test_the_decoder_of_a_model_that_takes_images(wrapper: str, tmp_path: Path) -> None:
    text = {"gemma4": "gemma4-small", "gemma4_unified": "gemma4-unified"}[wrapper]
    name, changes = FAMILIES[text]
    kind = getattr(transformers, name).model_type
    tied = changes["tie_word_embeddings"]
    config = transformers.CONFIG_MAPPING[wrapper](
        text_config={**COMMON, **changes, "model_type": kind, "pad_token_id": 0}, tie_word_embeddings=tied
    )
    config.vision_config = config.audio_config = None
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    got = generate(make_engine(tmp_path), greedy("a", PROMPT, 12))["a"]
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + got[:-1]])).logits[0, len(PROMPT) - 1 :]
    assert logits.argmax(-1).tolist() == got


@pytest.mark.parametrize(
    ("text", "giving", "taking"),
    [
        ("gemma4", (2, 2), (1, 1)),
        pytest.param("gemma4", (1, 1), (2, 2), marks=pytest.mark.slow),
        pytest.param("gemma4-small", (1, 1), (2, 1), marks=pytest.mark.slow),
        pytest.param("gemma4-small", (2, 1), (1, 1), marks=pytest.mark.slow),
        ("gemma4-small", (1, 1), (1, 3)),
        pytest.param("gemma4-small", (1, 2), (2, 1), marks=pytest.mark.slow),
        pytest.param("gemma4-small", (2, 3), (1, 1), marks=pytest.mark.slow),
    ],
)
def test_blocks_cross_between_grids(text: str, giving: Any, taking: Any, tmp_path: Path) -> None:
    check(write_checkpoint(text, tmp_path), giving, taking)


@pytest.mark.slow
def test_coarse_blocks_cross_between_grids(tmp_path: Path) -> None:
    check(write_checkpoint("gemma4", tmp_path), (2, 1), (1, 2), kv_dtype="int8")
