"""What a `config.json` says is what the decoder does; what it cannot do exactly is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.engine.models.families import FAMILIES as SUPPORTED
from penstock.engine.models.families import read_config
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.models.rope import RopeConfig
from penstock.engine.request import Request, SamplingParams
from penstock.errors import CheckpointError
from tests.engine.harness import drain, generate, greedy, make_engine
from tests.engine.tiny import COMMON, FAMILIES, Reference, write_checkpoint

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 8192,
}


def read(family: str, **more: Any) -> ModelConfig:
    return read_config({**SMALL, "model_type": family, **more})


def test_gemma_3_keys_of_both_ages_mean_the_same() -> None:
    common = {"hidden_activation": "gelu_pytorch_tanh", "sliding_window": 512, "query_pre_attn_scalar": 256}
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = read(
        "gemma3_text",
        **common,
        sliding_window_pattern=2,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling=scaling,
    )
    new = read(
        "gemma3_text",
        **common,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters={
            "full_attention": {**scaling, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    assert old == new
    assert old.windows == (512, None, 512, None)
    assert [rope.theta for rope in old.ropes] == [1e4, 1e6, 1e4, 1e6]
    assert [rope.kind for rope in old.ropes] == ["default", "linear"] * 2
    assert old.attention_scale == 1 / 16 and old.embedding_scale == 8.0 and old.attention_softcap is None
    seeing = read_config({"model_type": "gemma3", "vision_config": {}, "text_config": {**SMALL, **common}})
    assert seeing.family == "gemma3_text" and seeing.windows == (512, 512, 512, 512)


def test_gemma_2_has_caps_and_alternating_windows() -> None:
    config = read("gemma2", hidden_activation="gelu_pytorch_tanh", sliding_window=100, query_pre_attn_scalar=144)
    assert (config.attention_softcap, config.logit_softcap) == (50.0, 30.0)
    assert config.windows == (100, None, 100, None)
    assert math.isclose(config.attention_scale, 1 / 12)
    assert config.tied_embeddings and config.sandwich_norms and not config.plain_layers


def test_qwen3_moe_says_which_layers_have_experts() -> None:
    keys = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
    config = read("qwen3_moe", **keys, decoder_sparse_step=2, mlp_only_layers=[3])
    assert config.moe is not None
    assert config.moe.layers == (False, True, False, False)
    assert (config.moe.experts, config.moe.top_k, config.moe.ffn_size, config.moe.normalize) == (16, 4, 32, False)


def test_windows_left_out_are_the_references() -> None:
    """The tiny checkpoints are shorter than these."""
    assert read("mistral").windows == read("gemma3_text", num_hidden_layers=4).windows == (4096,) * 4
    assert read("gemma2").windows == (4096, None) * 2
    assert read("qwen2", use_sliding_window=True, max_window_layers=3).windows == (None, None, None, 4096)
    assert read("mixtral").windows == read("phi3").windows == read("qwen3").windows == (None,) * 4


def test_a_llama_is_plain() -> None:
    config = read("llama", sliding_window=None)
    assert config.plain_layers and config.windows == (None,) * 4
    assert config.ropes == (RopeConfig(original_max_positions=8192),) * 4


@pytest.mark.parametrize(
    ("family", "more", "message"),
    [
        ("qwen3_moe", {"mlp_only_layers": True}, "'mlp_only_layers' must be a list, found True"),
        ("mixtral", {"num_experts_per_tok": 9}, "a token cannot visit 9 of 8 experts"),
        ("nothing", {}, r"model_type 'nothing' is neither one of ours \(llama, mistral"),
        ("", {}, r"model_type '\(missing\)' is neither one of ours"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu', which llama models do not support; supported: 'silu'"),
        ("llama", {"sliding_window": 512}, "sliding_window is 512"),
        ("llama", {"is_causal": False}, "is_causal is False, which llama models do not support; supported: True"),
        ("gemma", {"hidden_act": "relu"}, "hidden_act is 'relu', which gemma models do not support"),
        ("gemma2", {"hidden_activation": "relu"}, "supported: 'gelu_pytorch_tanh'"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("mixtral", {"num_local_experts": None}, "num_local_experts"),
        ("mistral", {"layer_types": ["full_attention"] * 4}, "layer_types of mistral models must say what"),
        ("mistral", {"attention_bias": True}, "attention_bias is True, which mistral models do not support"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "there is no sliding window"),
        ("llama", {"num_key_value_heads": 3}, "4 heads over 3 KV heads"),
    ],
)
def test_what_cannot_be_run_is_refused(family: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(family, **more)


def test_every_supported_family_has_a_tiny_checkpoint() -> None:
    """The list of what is tested against the reference is the list of what is supported."""
    tested = {getattr(transformers, config).model_type for config, _ in FAMILIES.values()}
    assert tested == {name for name, family in SUPPORTED.items() if not family.reference}
    assert tested >= {family.reference for family in SUPPORTED.values() if family.reference}, "read as these are"


def scores(folder: Path, prompt: list[int], **settings: Any) -> torch.Tensor:
    """Log-probability of each prompt token after the first."""
    engine = make_engine(folder, **settings)
    engine.submit(Request("a", prompt, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)))
    first = drain(engine)[0]
    assert first.prompt_logprobs is not None
    return torch.tensor([part.logprob for part in first.prompt_logprobs if part is not None])


@pytest.mark.parametrize("family", ["gemma2", "mixtral"])
def test_log_probabilities_equal_the_reference(family: str, tmp_path: Path) -> None:
    """Soft caps move probabilities even where they leave the order of tokens alone."""
    folder = write_checkpoint(family, tmp_path)
    prompt = [7 * i % 199 for i in range(90)]
    expected = Reference(folder).logprobs(prompt)[:-1].gather(1, torch.tensor(prompt[1:]).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(scores(folder, prompt), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("family", ["mixtral", "gemma2", "phi3"])
def test_weights_in_blocks_stay_close(family: str, tmp_path: Path) -> None:
    """Experts too: each is quantized as any other linear."""
    folder = write_checkpoint(family, tmp_path, spread=0.3)
    prompt = [11 * i % 199 for i in range(120)]
    dense, blocks = scores(folder, prompt), scores(folder, prompt, weights="int8")
    assert 0 < float((dense - blocks).abs().mean()) < 0.05


def test_longrope_beyond_the_original_length(tmp_path: Path) -> None:
    """An engine that may serve longer contexts uses the long factors throughout; one that may not, the short ones."""
    factors = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [1.5 + 0.5 * i for i in range(8)]}
    config = transformers.Phi3Config(
        **COMMON, original_max_position_embeddings=64, rope_parameters={"rope_type": "longrope", **factors}
    )
    torch.manual_seed(5)
    transformers.Phi3ForCausalLM._from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    reference = Reference(tmp_path)
    long, short = [5 * i % 199 for i in range(300)], [3 * i % 199 for i in range(40)]
    engine = make_engine(tmp_path, token_budget=50)
    assert reference.agrees(long, generate(engine, greedy("long", long, 12))["long"])
    engine = make_engine(tmp_path, max_model_len=64)
    assert reference.agrees(short, generate(engine, greedy("short", short, 12))["short"])


def test_the_decoder_of_a_model_that_also_sees(tmp_path: Path) -> None:
    """Gemma 3 of 4B and up: the decoder lies one level down, in names and in the configuration."""
    folder = write_checkpoint("gemma3-two-ropes", tmp_path)
    prompt = [13 * i % 199 for i in range(60)]
    expected = generate(make_engine(folder), greedy("a", prompt, 10))
    text = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {}}))
    for prefix in ("language_model.", "model.language_model."):
        inner = "" if prefix.startswith("model") else "model."
        renamed = {f"{prefix}{inner}{name.removeprefix('model.')}": tensor for name, tensor in tensors.items()}
        save_file({**renamed, "vision_tower.patch.weight": torch.zeros(3)}, folder / "model.safetensors")
        assert generate(make_engine(folder), greedy("a", prompt, 10)) == expected


@pytest.mark.slow
def test_a_window_at_the_end_of_128k(tmp_path: Path) -> None:
    """Behind 131,000 tokens, with positions to match: what the windows of three layers reach decides, as it should."""
    config = transformers.MistralConfig(**{**COMMON, "max_position_embeddings": 131_072, "sliding_window": 32})
    torch.manual_seed(9)
    transformers.MistralForCausalLM._from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    prompt = [(17 * i + i // 199) % 199 for i in range(131_000)]
    engine = make_engine(tmp_path, token_budget=4096)
    got = generate(engine, greedy("a", prompt, 12))["a"]
    assert len(got) == 12
    reach = 3 * 32
    tokens, begin = [*prompt[-reach:], *got[:-1]], len(prompt) - reach
    positions = torch.arange(begin, begin + len(tokens)).unsqueeze(0)
    with torch.inference_mode():
        logits = Reference(tmp_path).model(torch.tensor([tokens]), position_ids=positions).logits[0, reach - 1 :]
    assert got == logits.argmax(-1).tolist()
