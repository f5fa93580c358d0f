"""HunYuan dense (0.5B to 7B) and A13B: a norm on each head of queries and keys behind the rotation, and a base of
frequencies that grows with `alpha`. A13B has experts scored by softmax beside one that all tokens visit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.models.families.family import (
    SILU,
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    flag,
    integer,
    layer_count,
    number,
)
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.engine.models.moe_config import MoeConfig
from penstock.engine.models.rope import RopeConfig, read_rope, rope_parameters
from penstock.errors import CheckpointError

_ROPES = ("default", "linear", "llama3", "dynamic")
"""Others scale cosines and sines, which norms behind them take back."""
_HEAD_NORMS = ("query_layernorm", "key_layernorm")


def _rope(raw: HFConfig, head_dim: int) -> RopeConfig:
    given = rope_parameters(raw)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in _ROPES:
        raise CheckpointError(
            f"rope scaling {kind!r:.80} is not supported for this family; supported: {', '.join(_ROPES)}"
        )
    if kind != "dynamic" or not given.get("alpha"):
        return read_rope(raw)
    alpha = number(given, "alpha")
    theta = number(given if given.get("rope_theta") is not None else raw, "rope_theta")
    if alpha <= 0 or theta <= 0 or head_dim <= 2:
        raise CheckpointError(f"rope dynamic: alpha is {alpha}, with base {theta} and heads of {head_dim}")
    static = {"rope_type": "default", "rope_theta": theta * alpha ** (head_dim / (head_dim - 2))}
    return read_rope({key: value for key, value in raw.items() if key != "rope_scaling"}, static)


def _fields(raw: HFConfig) -> ConfigFields:
    bias = flag(raw, "attention_bias")
    heads = integer(raw, "num_attention_heads")
    head_dim = integer(raw, "head_dim", integer(raw, "hidden_size") // heads)
    return {
        "head_dim": head_dim,
        "qkv_bias": bias,
        "output_bias": bias,
        "rotated_qk_norm": True,
        "rope": _rope(raw, head_dim),
    }


def _one(raw: HFConfig, key: str) -> int:
    """A number of all layers, which some files give for each."""
    value = raw[key]
    if isinstance(value, list | tuple) and len(value) == layer_count(raw) and len(set(map(repr, value))) == 1:
        return integer({key: value[0]}, key)
    return integer(raw, key)


def _moe_fields(raw: HFConfig) -> ConfigFields:
    ffn = integer(raw, "intermediate_size")
    moe = MoeConfig(
        experts=_one(raw, "num_local_experts" if "num_local_experts" in raw else "num_experts"),
        top_k=_one(raw, "num_experts_per_tok" if "num_experts_per_tok" in raw else "moe_topk"),
        ffn_size=ffn,
        normalize=True,
        layers=(True,) * layer_count(raw),
        shared_ffn_size=ffn,
    )
    return {**_fields(raw), "moe": moe}


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    ffn = config["intermediate_size"]
    for name in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        if keys.whole(name, 0) not in (0, ffn):
            raise CheckpointError(f"{keys.architecture}.{name} is {keys(name)}; supported: feed_forward_length, {ffn}")
    if keys.whole("expert_shared_count", 0) not in (0, 1):
        raise CheckpointError(f"{keys.architecture}.expert_shared_count is {keys('expert_shared_count')}; supported: 1")
    return {"num_experts": keys.whole("expert_count", 0), "moe_topk": keys.whole("expert_used_count", 0)}


HUNYUAN = Family(
    model_type="hunyuan_v1_dense",
    class_name="HunYuanDenseV1ForCausalLM",
    fields=_fields,
    reads=frozenset({"attention_bias"}),
    limits={"hidden_act": SILU},
    names=TensorNames(head_norms=_HEAD_NORMS),
    gguf=GGUFFormat(architectures=("hunyuan-dense",), windowed=False),
)
HUNYUAN_MOE = Family(
    model_type="hunyuan_v1_moe",
    class_name="HunYuanMoEV1ForCausalLM",
    fields=_moe_fields,
    reads=frozenset({"attention_bias", "moe_topk", "num_experts", "num_experts_per_tok", "num_local_experts"}),
    limits={"hidden_act": SILU},
    names=TensorNames(head_norms=_HEAD_NORMS, router="gate.wg", shared_expert="shared_mlp."),
    gguf=GGUFFormat(
        architectures=("hunyuan-moe",),
        config=_from_gguf,
        reads=frozenset({
            "expert_count", "expert_feed_forward_length", "expert_shared_count", "expert_shared_feed_forward_length",
            "expert_used_count",
        }),
        windowed=False,
        tensors={
            "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
            "ffn_up_shexp": "mlp.shared_mlp.up_proj",
            "ffn_down_shexp": "mlp.shared_mlp.down_proj",
        },
    ),
)  # fmt: skip
