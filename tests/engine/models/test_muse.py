"""Muse Glimmer and Muse Spark: what is refused, what the embedding and the head are made of, files without a head, and
what ranks with parts of every expert add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.engine.models.families import read_config
from penstock.errors import CheckpointError, ConfigError
from tests.engine.harness import generate, greedy, make_engine
from tests.engine.tiny import Reference, write_checkpoint

PROMPT = [(j * 31 + 7) % 199 for j in range(60)]
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 199,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("muse_glimmer_text", {"layer_rope_theta": [10000.0, 0, 500.0, 0]}, "layer_rope_theta must be 0 or rope_theta"),
        ("muse_glimmer_text", {"layer_rope_theta": [0, 0]}, "for each of 4 layers"),
        ("muse_glimmer_text", {"num_attention_heads": 6}, "no multiple of 6 heads"),
        ("muse_glimmer_text", {"hidden_activation": "gelu"}, "hidden_activation"),
        ("muse_glimmer_text", {"final_logit_softcapping": 0}, "final_logit_softcapping must be positive"),
        ("muse_spark_text", {"residual_gate_temperature": 0}, "residual_gate_temperature is 0"),
        ("muse_spark_text", {"mlp_layer_types": ["sparse"]}, "dense or sparse for each of 4 layers"),
        ("muse_spark_text", {"num_experts_per_tok": 400}, "cannot visit 400 of 256 experts"),
    ],
)
def test_what_cannot_be_run_is_refused(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config({"model_type": family, **SIZES, **changes})


def test_layers_that_see_everything_are_counted_from_the_last() -> None:
    config = read_config({"model_type": "muse_glimmer_text", **SIZES, "num_hidden_layers": 7})
    assert [layer for layer, window in enumerate(config.windows) if window is None] == [2, 6]
    assert [layer for layer, plain in enumerate(config.unrotated) if plain] == [2, 6]


def test_a_base_of_frequencies_is_that_of_the_reference() -> None:
    for family, theta in (("muse_glimmer_text", 10_000.0), ("muse_spark_text", 500_000.0)):
        theirs = transformers.CONFIG_MAPPING[family]().rope_parameters
        assert read_config({"model_type": family, **SIZES}).rope.theta == theta == theirs["rope_theta"]


@pytest.mark.parametrize("family", ["muse-glimmer-other", "muse-spark"])
def test_a_decoder_that_is_saved_without_its_head(family: str, tmp_path: Path) -> None:
    """The library's own text model, whose names have no prefix. Glimmer's head is the embedding as it is stored, and
    Spark has none then."""
    folder = write_checkpoint(family, tmp_path / "whole")
    tensors = load_file(folder / "model.safetensors")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((folder / "config.json").read_text())
    inner = {name.removeprefix("model."): part for name, part in tensors.items() if name != "lm_head.weight"}
    save_file(inner, bare / "model.safetensors")
    if family == "muse-spark":
        raw = json.loads((bare / "config.json").read_text())
        (bare / "config.json").write_text(json.dumps({**raw, "tie_word_embeddings": True}))
        with pytest.raises(CheckpointError, match=r"no lm_head\.weight"):
            make_engine(bare)
        return
    got = generate(make_engine(bare), greedy("a", PROMPT, 8))["a"]
    assert Reference(folder).agrees(PROMPT, got)


def test_rows_of_the_embedding_are_of_one_length_and_those_of_the_head_are_not(tmp_path: Path) -> None:
    decoder = make_engine(write_checkpoint("muse-glimmer-other", tmp_path)).runner.decoder
    lengths = decoder.embedding.float().square().mean(-1)
    torch.testing.assert_close(lengths, torch.ones_like(lengths), rtol=0, atol=1e-3)
    head = decoder.logits(torch.eye(decoder.config.hidden_size))
    assert float(head.std(0).std()) > 0.01


@pytest.mark.parametrize("speculation", ["auto", "draft", "eagle3"])
def test_its_drafter_is_refused_by_name(speculation: Any, tmp_path: Path) -> None:
    folder = write_checkpoint("muse-glimmer", tmp_path / "model")
    drafter = tmp_path / "drafter"
    transformers.MuseGlimmerAssistantConfig(hidden_size=64).save_pretrained(drafter)
    with pytest.raises(ConfigError, match="muse_glimmer_assistant fills a block of draft tokens in one pass"):
        make_engine(folder, speculation=speculation, draft_model=str(drafter))
