"""Writing a Hugging Face style configuration from GGUF metadata.

Callers see one vocabulary of keys whatever the file format. What the metadata leaves unsaid is read off the
tensors themselves (tied head, biases, vocabulary size) and never guessed when the file can tell.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from penstock.engine.loading.gguf import GGUFFile
from penstock.errors import CheckpointError

MODEL_TYPES = {
    "llama": "llama",
    "mistral3": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
}
"""GGUF architecture to Hugging Face `model_type`."""

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}


def architecture(file: GGUFFile) -> str:
    """The file's architecture, if it is one whose tensor names are known."""
    arch = file.metadata.get("general.architecture")
    if arch not in MODEL_TYPES:
        raise CheckpointError(
            f"{file.path}: GGUF architecture {arch!r} is not supported; supported: {', '.join(sorted(MODEL_TYPES))}"
        )
    return str(arch)


def config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """The keys of a `config.json` for the model in `file`."""
    arch = architecture(file)
    metadata = file.metadata
    split_count = metadata.get("split.count", 0)
    if split_count > 1:
        raise CheckpointError(
            f"{file.path} is one of {split_count} parts of a model; merge them into one file "
            f"(`llama-gguf-split --merge`) and load that"
        )

    def key(name: str, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.{name}", default)
        return _single(value)

    def required(name: str) -> Any:
        value = key(name)
        if not isinstance(value, int | float) or value <= 0:
            raise CheckpointError(
                f"{file.path}: {arch}.{name} must be a positive number and is {value!r}; "
                f"the file is damaged or not a language model"
            )
        return value

    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path} has no token_embd.weight: it does not hold a language model")
    heads = required("attention.head_count")
    hidden = required("embedding_length")
    rotated = key("rope.dimension_count")
    # Files that leave the size of a head unsaid give the rotated part of it; in Phi that may not be all.
    head_dim = key("attention.key_length") or (rotated if arch != "phi3" else None) or hidden // heads
    config: dict[str, Any] = {
        "model_type": MODEL_TYPES[arch],
        "hidden_size": hidden,
        "intermediate_size": required("feed_forward_length"),
        "num_hidden_layers": required("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": key("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": _short(required("attention.layer_norm_rms_epsilon")),
        "rope_theta": _short(key("rope.freq_base", 10000.0)),
        "max_position_embeddings": required("context_length"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    }
    window = key("attention.sliding_window")
    if window:
        config["sliding_window"] = window
        config["use_sliding_window"] = True
        if config["model_type"] == "llama":
            config["model_type"] = "mistral"
    if rotated and rotated < head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    config["rope_scaling"] = _rope_scaling(file, arch, config)
    _add_experts(config, key)
    _add_gemma(config, key)
    _add_token_ids(config, file)
    config["architectures"] = [_CLASSES[config["model_type"]]]
    dense = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}.get(embedding.type_name)
    if dense is not None:
        config["torch_dtype"] = dense
    return config


def _single(value: Any) -> Any:
    """Some writers give one number per layer; the decoder wants one for all."""
    if isinstance(value, np.ndarray):
        unique = set(value.tolist())
        if len(unique) != 1:
            raise CheckpointError("layers of different shapes are not supported")
        return unique.pop()
    return value


def _short(value: float) -> float:
    """The decimal that was rounded to float32 when the file was written (1e-5, not 9.9999997e-06)."""
    return float(f"{value:.7g}")


def _rope_scaling(file: GGUFFile, arch: str, config: dict[str, Any]) -> dict[str, Any] | None:
    metadata = file.metadata
    if "rope_freqs.weight" in file.tensors:
        return _frequency_factors(file.floats("rope_freqs.weight"), config)
    kind = metadata.get(f"{arch}.rope.scaling.type")
    original = metadata.get(f"{arch}.rope.scaling.original_context_length")
    if "rope_factors_long.weight" in file.tensors:
        lists = {f"{length}_factor": file.floats(f"rope_factors_{length}.weight") for length in ("long", "short")}
        config["original_max_position_embeddings"] = original
        return {"rope_type": "longrope", **lists, "original_max_position_embeddings": original}
    if kind in (None, "none"):
        return None
    factor = _short(metadata.get(f"{arch}.rope.scaling.factor", 1.0))
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    for theirs, ours in (
        ("attn_factor", "attention_factor"),
        ("yarn_attn_factor", "attention_factor"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        value = metadata.get(f"{arch}.rope.scaling.{theirs}")
        if value is not None:
            scaling[ours] = _short(value)
    return scaling


def _frequency_factors(factors: list[float], config: dict[str, Any]) -> dict[str, Any] | None:
    """Divisors of the rotary frequencies, given one by one. Those of Llama 3 are recognised and named as the
    rule they came from; any others come back as `{"rope_type": "factors", "factors": [...]}`."""
    if all(factor == 1.0 for factor in factors):
        return None
    rule = {
        "rope_type": "llama3",
        "factor": float(f"{max(factors):.5g}"),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = llama3_factors(rule, config["rope_theta"], config["head_dim"])
    if len(expected) == len(factors) and all(
        math.isclose(a, b, rel_tol=1e-4) for a, b in zip(expected, factors, strict=True)
    ):
        return rule
    return {"rope_type": "factors", "factors": factors}


def llama3_factors(rule: dict[str, Any], theta: float, head_dim: int) -> list[float]:
    """By how much Llama 3's scaling divides each rotary frequency: 1 for short wavelengths, `factor` for long
    ones, interpolated in between."""
    factors = []
    low, high, old = rule["low_freq_factor"], rule["high_freq_factor"], rule["original_max_position_embeddings"]
    for index in range(0, head_dim, 2):
        turns = old * theta ** (-index / head_dim) / (2 * math.pi)
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / rule["factor"] + smooth))
    return factors


def _add_experts(config: dict[str, Any], key: Any) -> None:
    experts = key("expert_count")
    if not experts:
        return
    if config["model_type"] in ("llama", "mistral"):
        config["model_type"] = "mixtral"
        config["num_local_experts"] = experts
    else:
        config["num_experts"] = experts
        config["moe_intermediate_size"] = key("expert_feed_forward_length", config["intermediate_size"])
        shared = key("expert_shared_feed_forward_length")
        if shared:
            config["shared_expert_intermediate_size"] = shared
        config["norm_topk_prob"] = config["model_type"] == "qwen3_moe"
    config["num_experts_per_tok"] = key("expert_used_count")


def _add_gemma(config: dict[str, Any], key: Any) -> None:
    kind = config["model_type"]
    if not kind.startswith("gemma"):
        return
    config["hidden_act"] = config["hidden_activation"] = "gelu_pytorch_tanh"
    layers, per_head = config["num_hidden_layers"], config["hidden_size"] // config["num_attention_heads"]
    # The two 27B models scale attention by the width per head; the file does not say so.
    wide = (kind == "gemma2" and layers == 46) or (kind == "gemma3_text" and layers == 62)
    config["query_pre_attn_scalar"] = per_head if wide else config["head_dim"]
    if kind == "gemma2":
        config["attn_logit_softcapping"] = _short(key("attn_logit_softcapping", 50.0))
        config["final_logit_softcapping"] = _short(key("final_logit_softcapping", 30.0))
    period = {"gemma2": 2, "gemma3_text": 6}.get(kind)
    if period and "sliding_window" in config:
        config["layer_types"] = [
            "full_attention" if (layer + 1) % period == 0 else "sliding_attention" for layer in range(layers)
        ]
    if kind == "gemma3_text":
        config["rope_local_base_freq"] = _short(key("rope.freq_base_swa", 10000.0))


def _add_token_ids(config: dict[str, Any], file: GGUFFile) -> None:
    metadata = file.metadata
    ends = []
    for name in ("eos_token_id", "eot_token_id", "eom_token_id"):
        token = metadata.get(f"tokenizer.ggml.{name}")
        if token is not None and token not in ends:
            ends.append(token)
    if ends:
        config["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    for ours, theirs in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        token = metadata.get(f"tokenizer.ggml.{theirs}")
        if token is not None:
            config[ours] = token
