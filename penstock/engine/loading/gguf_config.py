"""A Hugging Face style configuration from the metadata of a GGUF file.

Callers see the same keys whatever the file format. What the metadata leaves out is read off the tensors (tied head,
biases, vocabulary size) and never guessed when the file can tell. What a family adds is in its descriptor
(`models.families`).
"""

from __future__ import annotations

from typing import Any

from penstock.engine.loading.gguf import GGUFFile
from penstock.engine.loading.gguf_keys import check_keys, require_same
from penstock.engine.loading.gguf_rope import rope_scaling
from penstock.engine.models.families import Family, GGUFKeys, family_of_gguf, gguf_architectures
from penstock.engine.models.families.family import GGUFFormat
from penstock.errors import CheckpointError

_GEMMA4_ENDS = ("<eos>", "<turn|>", "<|tool_response>")


def gguf_family(file: GGUFFile) -> Family:
    """The family of the model in `file`; one whose tensor names are not known is refused."""
    architecture = str(file.metadata.get("general.architecture"))
    family = family_of_gguf(GGUFKeys(architecture, file.metadata))
    if family is None:
        raise CheckpointError(
            f"{file.path}: GGUF architecture {architecture!r:.80} is not supported; "
            f"supported: {', '.join(gguf_architectures())}"
        )
    return family


def config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """The keys of a `config.json` for the model in `file`; a file that cannot be run exactly is refused."""
    family, metadata = gguf_family(file), file.metadata
    key = GGUFKeys(str(metadata["general.architecture"]), metadata)
    where = str(file.path)
    kind, parts = metadata.get("general.type", "model"), metadata.get("split.count", 0)
    if kind != "model":
        raise CheckpointError(f"{file.path} holds a {kind!r:.80}, not a model")
    if parts not in (0, 1):
        raise CheckpointError(
            f"{file.path} is one of {parts!r:.80} parts of a model; merge them into one file "
            f"(`llama-gguf-split --merge`) and load that"
        )
    check_keys(where, family, key)

    def required(name: str) -> int:
        value = key.whole(name, 0)
        if value == 0:
            raise CheckpointError(
                f"{file.path}: {key.architecture}.{name} is missing or 0; the file is damaged or not a language model"
            )
        return value

    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{file.path} has no token_embd.weight: it does not hold a language model")
    hidden, layers = required("embedding_length"), required("block_count")
    if layers > len(file.tensors):
        raise CheckpointError(f"{file.path} says it has {layers} layers but holds {len(file.tensors)} tensors")
    several = key.each("attention.head_count", layers) if family.gguf.query_heads else (0,)
    heads = 1
    if family.gguf.attention:
        heads = max(several) if min(several) else required("attention.head_count")
    by_layer = family.gguf.mamba or family.gguf.short_conv or family.gguf.layer_sizes
    kv_heads, width = (
        max(key.each(name, layers)) or otherwise if by_layer else key.whole(name, otherwise)
        for name, otherwise in (("attention.head_count_kv", heads), ("feed_forward_length", 0))
    )
    rotated = key.whole("rope.dimension_count", 0)
    head_dim = (
        (0 if family.gguf.own_head_sizes else key.whole("attention.key_length", 0))
        or (rotated if family.gguf.whole_head_rotated else 0)
        or max(hidden // heads, 1)
    )
    config: dict[str, Any] = {
        "model_type": family.model_type,
        "architectures": [family.class_name],
        "hidden_size": hidden,
        # Left out where experts are all there is.
        "intermediate_size": width
        or key.whole("expert_feed_forward_length", 0)
        or (required("feed_forward_length") if family.gguf.attention else 1),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_attention_heads_per_layer": list(several) if family.gguf.query_heads else None,
        "gates": [_rows(file, f"blk.{layer}.attn_gate.weight") for layer in range(layers)],
        "num_key_value_heads": kv_heads or heads,
        "head_dim": head_dim,
        "rms_norm_eps": key.number(family.gguf.epsilon, 0.0) or key.number(family.gguf.other_epsilon, 0.0),
        "rope_theta": key.number("rope.freq_base", 10000.0),
        "max_position_embeddings": required("context_length"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "hidden_act": family.hidden_act,
        "attention_bias": _stores(file, ".attn_q.bias"),
        "fused_bias": _stores(file, ".attn_qkv.bias"),
        "conv_bias": _stores(file, ".shortconv.in_proj.bias"),
        "feed_forward_norm": _stores(file, ".ffn_norm.weight"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "attention_k_eq_v": _keys_alone(file),
        "routed_layers": [f"blk.{layer}.ffn_gate_inp.weight" in file.tensors for layer in range(layers)],
        "vocab_size_per_layer_input": _rows(file, "per_layer_token_embd.weight") or embedding.shape[0],
    }
    if _stores(file, ".ffn_down.bias") or _stores(file, ".ffn_down_shexp.bias"):
        config["mlp_bias"] = True
    if family.gguf.mamba:
        config |= {
            "mamba_conv_bias": _stores(file, ".ssm_conv1d.bias"),
            "mamba_proj_bias": _stores(file, ".ssm_in.bias"),
            "projectors_bias": _stores(file, ".ssm_out.bias"),
            "mamba_rms_norm": _stores(file, ".ssm_norm.weight"),
        }
    if config["rms_norm_eps"] <= 0 or config["rope_theta"] <= 0:
        raise CheckpointError(f"{file.path}: the epsilon of its norms and its rope.freq_base must be positive")
    # Said even where there is none: a file means something else by leaving a key out than a config.json does.
    window = key.whole("attention.sliding_window", 0)
    if window and not family.gguf.windowed:
        if window < config["max_position_embeddings"]:
            raise CheckpointError(f"{file.path}: sliding windows are not supported in {key.architecture} files")
        window = 0
    config["sliding_window"] = window or None
    if rotated and rotated != head_dim:
        if rotated > head_dim or rotated % 2 or key.architecture == "llama":
            raise CheckpointError(f"{file.path}: it rotates {rotated} of {head_dim} dimensions, which is not supported")
        share = rotated / head_dim
        config["partial_rotary_factor"] = share if int(head_dim * share) == rotated else (rotated + 0.5) / head_dim
    _check_sizes(where, key, config, family.gguf)
    config["rope_scaling"] = rope_scaling(file, key, config)
    if family.gguf.config is not None:
        config |= family.gguf.config(key, config)
    if "attention_multiplier" not in config:  # which is that scale
        require_same(where, key, "attention.scale", max(config.get("query_pre_attn_scalar", head_dim), 1) ** -0.5)
    # What all families are asked, and this one's configuration does not have; its tensors are checked all the same.
    rules = family.rules
    config = {name: value for name, value in config.items() if rules.knows(name)}
    _add_token_ids(config, file)
    dense = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}.get(embedding.type_name)
    if dense is not None:
        config["torch_dtype"] = dense
    return config


def _stores(file: GGUFFile, ending: str) -> bool:
    """Whether some layer has that tensor; the first may be of another kind than the others."""
    return any(name.endswith(ending) for name in file.tensors)


def _keys_alone(file: GGUFFile) -> bool:
    """Whether some layer has a matrix of keys and none of values."""
    values = {name.replace("attn_v", "attn_k") for name in file.tensors if name.endswith(".attn_v.weight")}
    return any(name.endswith(".attn_k.weight") and name not in values for name in file.tensors)


def _rows(file: GGUFFile, name: str) -> int:
    """Of a matrix; 0 where there is none."""
    found = file.tensors.get(name)
    return 0 if found is None else found.shape[0]


def _check_sizes(where: str, key: GGUFKeys, config: dict[str, Any], format: GGUFFormat) -> None:
    """Sizes that the format can give separately, and that are one here."""
    head_dim, theta = config["head_dim"], config["rope_theta"]
    rotated = key.whole("rope.dimension_count", head_dim) or head_dim
    value_dim = head_dim
    if format.value_heads:
        value_dim = key.whole("attention.value_length", 0) or config["hidden_size"] // config["num_attention_heads"]
    elif not format.own_head_sizes:
        require_same(where, key, "attention.value_length", head_dim)
    if not format.window_heads:
        require_same(where, key, "attention.key_length_swa", head_dim)
        require_same(where, key, "attention.value_length_swa", value_dim)
    require_same(where, key, "embedding_length_out", config["hidden_size"])
    if not format.window_heads and not format.window_rotated:
        require_same(where, key, "rope.dimension_count_swa", rotated)
    if not format.window_rope:
        require_same(where, key, "rope.freq_base_swa", theta)
    elif key.number("rope.scaling.attn_factor", 1.0) != 1.0:
        raise CheckpointError(f"{where}: rope.scaling.attn_factor is not supported in {key.architecture} files")


def _add_token_ids(config: dict[str, Any], file: GGUFFile) -> None:
    ends: list[int] = []
    for name in ("eos_token_id", "eot_token_id", "eom_token_id"):
        token = _token(file, name)
        if token is not None and token not in ends:
            ends.append(token)
    ends += [token for token in _ends_by_name(file) if token not in ends]
    if ends:
        config["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    for ours, theirs in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        token = _token(file, theirs)
        if token is not None:
            config[ours] = token


def _ends_by_name(file: GGUFFile) -> list[int]:
    """Gemma 4 ends turns with tokens that its files have no key for; llama.cpp knows them by their names."""
    kind, tokens = (file.metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "tokens"))
    if not isinstance(kind, str) or kind != "gemma4" or not isinstance(tokens, list):
        return []
    return [index for index, token in enumerate(tokens) if token in _GEMMA4_ENDS]


def _token(file: GGUFFile, name: str) -> int | None:
    token = file.metadata.get(f"tokenizer.ggml.{name}")
    if token is not None and (not isinstance(token, int) or isinstance(token, bool) or token < 0):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.{name} must be a token id, found {token!r:.80}")
    return token
