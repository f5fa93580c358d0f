"""Tensor names of DeepSeek V4: as DeepSeek publishes it, as transformers writes it, and those that it has here, which
are those of transformers in memory."""

from __future__ import annotations

_EVERYWHERE = {
    "embed": "embed_tokens", "attn": "self_attn", "ffn": "mlp", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "wq_a": "q_a_proj", "wq_b": "q_b_proj", "wkv": "kv_proj",
    "wgate": "gate_proj", "wo_a": "o_a_proj", "wo_b": "o_b_proj", "q_norm": "q_a_norm", "attn_sink": "sinks",
    "ape": "position_bias", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj",
}  # fmt: skip
_HEAD = "hc_head_"
_PREDICTS = "mtp"
"""What the names of layers for multi-token prediction begin with."""


def own_name(name: str) -> str:
    parts = name.split(".")
    if name.startswith("lm_head."):
        return name
    if parts[0] == _PREDICTS and len(parts) > 2:
        return ".".join(parts[:2] + _that_predicts(parts[2:]))
    if name == "head.weight":
        return "lm_head.weight"
    if parts[0] == "model":
        del parts[0]
    if parts[0].startswith(_HEAD):
        parts = ["hc_head", parts[0].removeprefix(_HEAD)]
    if parts[0] == "hc_head":
        parts[-1] = f"hc_{parts[-1].removeprefix('hc_')}"
    elif parts[0] == "layers":
        parts = parts[:2] + _in_layer(parts[2:])
    else:
        parts = [_EVERYWHERE.get(part, part) for part in parts]
    return ".".join(["model", *parts])


def _that_predicts(parts: list[str]) -> list[str]:
    """In a layer for multi-token prediction, which has a head of its own before its last norm."""
    if parts[0].startswith(_HEAD):
        return ["hc_head", f"hc_{parts[0].removeprefix(_HEAD)}"]
    if parts[0] in ("e_proj", "h_proj") and parts[-1] == "scale":
        return [parts[0], "weight_scale_inv"]
    return _in_layer(parts)


def _in_layer(parts: list[str]) -> list[str]:
    for stored, own in (("hc_attn_", "attn_hc"), ("hc_ffn_", "ffn_hc")):
        if parts[0].startswith(stored):
            return [own, parts[0].removeprefix(stored)]
    if parts[1:3] == ["indexer", "compressor"]:
        parts = [parts[0], "compressor", "indexer", *parts[3:]]
    elif parts[1:2] == ["indexer"]:
        scored = ["scorer"] if parts[2] == "weights_proj" else []
        parts = [parts[0], "compressor", "indexer", *scored, *parts[2:]]
    if parts[0] == "attn":
        parts = ["kv_norm" if part == "norm" else part for part in parts]
    if parts[0] == "ffn" and parts[1:] == ["gate", "bias"]:
        parts = [*parts[:-1], "e_score_correction_bias"]
    if parts[-1] == "scale" and len(parts) > 2:
        parts = [*parts[:-1], "weight_scale_inv"]
    return [_EVERYWHERE.get(part, part) for part in parts]
