"""A key that changes what the reference computes is honoured or refused, never ignored; one left out is the reference's
default. `config_walk` has the cases."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.engine.loading.keys import ABSENT
from penstock.engine.models import reference_keys
from penstock.engine.models.families import FAMILIES, read_config
from penstock.engine.models.families.config_keys import reference_of
from penstock.errors import CheckpointError
from tests.engine.models import reference_keys as generator
from tests.engine.models.config_walk import (
    BASES,
    PROMPT,
    SIZES,
    YARN,
    Case,
    cases,
    our_scores,
    verdict,
    write_weights,
)

OWN_CLASS = {name for name, family in FAMILIES.items() if not family.reference}
"""Families that the reference has a configuration class for."""
DIVIDED = ("muse_spark_text", "cwm", "minicpm3", "hrm_text", "jais2", "stablelm", "helium")
"""Whose heads make up a hidden state."""
LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are so small that threads only wait for each other
    yield
    torch.set_num_threads(threads)
    transformers.logging.enable_progress_bar()
    transformers.logging.set_verbosity(verbosity)


def test_the_table_has_the_keys_of_the_installed_reference() -> None:
    """After an upgrade: `python -m tests.engine.models.reference_keys`, then the slow tests below."""
    for family in (*OWN_CLASS, "bert"):
        known = reference_of(family)
        for key, default in generator.declared(transformers.CONFIG_MAPPING[family]).items():
            assert key in known and known[key] == default, f"{family}: {key}"


@pytest.mark.slow
def test_the_table_is_what_the_installed_reference_gives() -> None:
    """Also the attributes that its models ask for."""
    for name, table in generator.tables().items():
        assert table == getattr(reference_keys, name)


def test_every_family_is_walked() -> None:
    assert set(BASES) == OWN_CLASS


HONOURED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("olmoe", {"clip_qkv": 0.4}),
    ("phi", {"qk_layernorm": True}),
    ("ernie4_5_moe", {"use_bias": True}),
    ("cohere2_moe", {"rope_scaling": LINEAR}),
    ("llama", {"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}),
    ("llama", {"rope_parameters": {**YARN, "factor": None}}),
    ("llama", {"rope_parameters": {**YARN, "truncate": False}, "original_max_position_embeddings": 48}),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
    ("llama", {"hidden_act": "swish"}),
    ("mixtral", {"rope_theta": ABSENT, "rms_norm_eps": ABSENT}),
    ("mixtral", {"num_experts": 3}),
    ("qwen2", {"max_window_layers": 0}),
    ("gemma", {"head_dim": ABSENT, "tie_word_embeddings": ABSENT, "hidden_act": "gelu"}),
    ("gemma3_text", {"sliding_window": ABSENT, "rope_theta": ABSENT, "rope_local_base_freq": ABSENT}),
    ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("phi3", {"rms_norm_eps": ABSENT}),
    ("deepseek_v3", {"rope_interleave": False, "norm_topk_prob": False, "attention_bias": True}),
    ("deepseek_v3", {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}}),
    ("deepseek_v2", {"topk_group": 1, "num_experts_per_tok": 4, "norm_topk_prob": True}),
)
REFUSED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {"is_causal": False}),
    ("llama", {"sliding_window": 7}),
    ("llama", {"partial_rotary_factor": 0.5}),
    ("llama", {"attention_chunk_size": 8}),
    ("gemma", {"hidden_act": "relu"}),
    ("gemma", {"hidden_act": "silu"}),
    ("gemma", {"use_bidirectional_attention": True}),
    ("gemma2", {"hidden_activation": "relu"}),
    ("gemma2", {"use_bidirectional_attention": True}),
    ("gemma3_text", {"use_bidirectional_attention": True}),
    ("gemma2", {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default"}}}),
    ("mistral", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
    ("qwen3", {"layer_types": ["chunked_attention"] * 4}),
)


@pytest.mark.parametrize(("family", "changes"), HONOURED, ids=lambda value: str(value)[:60])
def test_honoured(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    assert verdict(Case(family, changes), tmp_path / "model") == "equal"


@pytest.mark.parametrize(("family", "changes"), REFUSED, ids=lambda value: str(value)[:60])
def test_refused_with_its_name(family: str, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="|".join(changes) + "|rope parameters"):
        read_config(Case(family, changes).config)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", BASES)
def test_a_value_is_read_or_refused_whatever_it_is(family: str, every: int, caplog: pytest.LogCaptureFixture) -> None:
    """Of every case of the walk, or each third one, which is one or two of most keys: no other exception, and nothing
    that the reference knows passes as unknown."""
    outcomes: Counter[str] = Counter()
    with caplog.at_level(logging.WARNING):
        for case in islice(cases(family), 0, None, every):
            try:
                read_config(case.config)
                outcomes["read"] += 1
            except CheckpointError:
                outcomes["refused"] += 1
    assert outcomes["read"] > 100 / every and outcomes["refused"] > 90 / every
    known = reference_of(family)
    for record in caplog.records:
        assert not known.keys() & set(record.getMessage().rpartition(": ")[2].split(", "))


@pytest.mark.parametrize("family", BASES)
def test_sizes_left_out_are_the_references(family: str) -> None:
    """These are compared without running: the defaults are those of whole models."""
    for key in SIZES:
        changes = {"head_dim": 8, key: ABSENT}
        if key == "num_hidden_layers" and "layer_types" in BASES[family]:
            changes["layer_types"] = ["full_attention"] * reference_of(family)[key]
        if key == "num_attention_heads" and "kv_lora_rank" in BASES[family]:
            changes["num_key_value_heads"] = ABSENT
        if family in DIVIDED and key == "num_attention_heads":
            changes["hidden_size"] = reference_of(family)[key] * 8  # which the reference divides by it
        if family in DIVIDED[4:] and key == "hidden_size":
            changes["head_dim"] = reference_of(family)[key] // 4
        if family == "mamba2" and key == "hidden_size":
            changes["num_heads"] = reference_of(family)["expand"] * reference_of(family)[key] // 8
        if family == "mistral4":  # the sum of two other sizes
            changes["head_dim"] = ABSENT
        if family == "gemma4_text":  # the other table must be as large
            changes["vocab_size_per_layer_input"] = ABSENT
        if key == "num_hidden_layers" and "compress_ratios" in BASES[family]:
            changes["compress_ratios"] = [4] * reference_of(family)[key]
        if family == "mistral_large4_text" and key == "num_hidden_layers":
            changes["kv_source_layers"] = ABSENT
        if family in ("minimax_m3_vl_text", "muse_spark_text") and key == "num_hidden_layers":
            changes["mlp_layer_types"] = ABSENT
        if family == "step3p5":  # lists have an entry for each layer; where their heads differ, there is no one number
            lists = ("layer_types", "swiglu_limits", "swiglu_limits_shared", "partial_rotary_factors")
            changes |= dict.fromkeys(lists, ABSENT)
        if family == "laguna":  # the most of them counts
            changes["num_attention_heads_per_layer"] = ABSENT
        if family == "lfm2":  # the width is another than the key says
            changes["block_auto_adjust_ff_dim"] = False
        config = Case(family, changes).config
        theirs = transformers.CONFIG_MAPPING[family](**{k: v for k, v in config.items() if k != "model_type"})
        ours = read_config(config)
        # What these call the width of their dense layers is another key.
        of_experts = family in ("llama4_text", "cohere2_moe", "minimax_m3_vl_text") and ours.moe is not None
        ffn = ours.moe.ffn_size if of_experts and ours.moe is not None else ours.ffn_size
        found = (ours.vocab_size, ours.hidden_size, ffn, ours.num_layers, ours.num_heads)
        known = reference_of(family)  # some have no dense width, or no attention
        for name, size in zip(SIZES, found, strict=True):
            assert known.get(name, ABSENT) is ABSENT or size == getattr(theirs, name), name


@pytest.mark.slow
@pytest.mark.parametrize("family", BASES)
def test_every_key_gives_the_references_output_or_is_refused(family: str, tmp_path: Path) -> None:
    wrong, outcomes = [], Counter[str]()
    for index, case in enumerate([Case(family, {}), *cases(family)]):
        found = verdict(case, tmp_path / str(index))
        outcomes[found.split(":")[0]] += 1
        if not found.startswith(("equal", "refused", "reference failed")):
            wrong.append(f"{case}: {found}")
    print(family, dict(outcomes))
    assert not wrong, "\n".join(wrong)
    assert outcomes["equal"] > 100


def test_a_stored_head_is_used_whatever_the_configuration_says(tmp_path: Path) -> None:
    """As in the reference; an untied head that is missing is not made up."""
    config = Case("llama", {"tie_word_embeddings": False}).config
    write_weights(config, tmp_path)
    untied = our_scores(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.inference_mode():
        logprobs = reference(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(PROMPT[1:]).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(our_scores(tmp_path), expected, rtol=0, atol=2e-3)
    torch.testing.assert_close(our_scores(tmp_path), untied)

    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert float((our_scores(tmp_path) - untied).abs().max()) > 0.1, "the embedding is the head"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"has no lm_head\.weight, and tie_word_embeddings is false"):
        our_scores(tmp_path)
