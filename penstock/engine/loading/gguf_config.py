"""A Hugging Face style configuration from the metadata of a GGUF file.

Callers see the same keys whatever the file format. What the metadata leaves out is read off the tensors (tied head,
biases, vocabulary size) and never guessed when the file can tell. What a family adds is in its descriptor
(`models.families`).
"""

from __future__ import annotations

import math
from typing import Any

from penstock.engine.loading.gguf import GGUFFile
from penstock.engine.models.families import Family, GGUFKeys, family_of_gguf, gguf_architectures, short_decimal
from penstock.errors import CheckpointError


def gguf_family(file: GGUFFile) -> Family:
    """The family of the model in `file`; one whose tensor names are not known is refused."""
    architecture = str(file.metadata.get("general.architecture"))
    family = family_of_gguf(GGUFKeys(architecture, file.metadata))
    if family is None:
        raise CheckpointError(
            f"{file.path}: GGUF architecture {architecture!r} is not supported; "
            f"supported: {', '.join(gguf_architectures())}"
        )
    return family


def config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """The keys of a `config.json` for the model in `file`."""
    family, metadata = gguf_family(file), file.metadata
    key = GGUFKeys(str(metadata["general.architecture"]), metadata)
    split_count = metadata.get("split.count", 0)
    if split_count > 1:
        raise CheckpointError(
            f"{file.path} is one of {split_count} parts of a model; merge them into one file "
            f"(`llama-gguf-split --merge`) and load that"
        )

    def required(name: str) -> Any:
        value = key(name)
        if not isinstance(value, int | float) or value <= 0:
            raise CheckpointError(
                f"{file.path}: {key.architecture}.{name} must be a positive number and is {value!r}; "
                f"the file is damaged or not a language model"
            )
        return value

    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path} has no token_embd.weight: it does not hold a language model")
    heads = required("attention.head_count")
    hidden = required("embedding_length")
    rotated = key("rope.dimension_count")
    head_dim = key("attention.key_length") or (rotated if family.gguf.whole_head_rotated else None) or hidden // heads
    config: dict[str, Any] = {
        "model_type": family.model_type,
        "architectures": [family.class_name],
        "hidden_size": hidden,
        "intermediate_size": required("feed_forward_length"),
        "num_hidden_layers": required("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": key("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": short_decimal(required("attention.layer_norm_rms_epsilon")),
        "rope_theta": key.decimal("rope.freq_base", 10000.0),
        "max_position_embeddings": required("context_length"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "hidden_act": family.hidden_act,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    }
    # Said even where there is none: a file means something else by leaving a key out than a config.json does.
    config["sliding_window"] = key("attention.sliding_window") or None
    config["use_sliding_window"] = config["sliding_window"] is not None
    if rotated and rotated < head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    config["rope_scaling"] = _rope_scaling(file, key, config)
    if family.gguf.config is not None:
        config |= family.gguf.config(key, config)
    _add_token_ids(config, file)
    dense = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}.get(embedding.type_name)
    if dense is not None:
        config["torch_dtype"] = dense
    return config


def _rope_scaling(file: GGUFFile, key: GGUFKeys, config: dict[str, Any]) -> dict[str, Any] | None:
    if "rope_freqs.weight" in file.tensors:
        return _frequency_factors(file.floats("rope_freqs.weight"), config)
    kind = key("rope.scaling.type")
    original = key("rope.scaling.original_context_length")
    if "rope_factors_long.weight" in file.tensors:
        lists = {f"{length}_factor": file.floats(f"rope_factors_{length}.weight") for length in ("long", "short")}
        config["original_max_position_embeddings"] = original
        return {"rope_type": "longrope", **lists, "original_max_position_embeddings": original}
    if kind in (None, "none"):
        return None
    factor = key.decimal("rope.scaling.factor", 1.0)
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    for theirs, ours in (
        ("attn_factor", "attention_factor"),
        ("yarn_attn_factor", "attention_factor"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        value = key(f"rope.scaling.{theirs}")
        if value is not None:
            scaling[ours] = short_decimal(value)
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
