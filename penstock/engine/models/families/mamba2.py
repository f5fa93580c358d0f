"""Mamba-2 alone (Codestral Mamba): every layer is one such mixer, and nothing is kept per token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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
from penstock.engine.models.families.mamba import MAMBA_MATRICES, SSM_KEYS, expansion, ssm_sizes, time_step_range
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.engine.models.model_config import LayerPart
from penstock.engine.models.recurrence_config import MambaConfig
from penstock.engine.models.rope import NO_ROPE
from penstock.errors import CheckpointError

if TYPE_CHECKING:
    from penstock.engine.models.architecture import Architecture

LONGEST = 1 << 20
"""Tokens of a sequence. The model has no positions, and its state no end; the engine's tables have one."""
UNUSED = frozenset({
    "chunk_size", "expand", "time_step_min", "time_step_max", "time_step_floor", "time_step_rank",
    "rescale_prenorm_residual", "residual_in_fp32",
})  # fmt: skip
"""Used to draw new weights, or to say how sums are rounded. The residual stream has the form that the backend gives it
for every family."""
NAMES = TensorNames(
    prefix="backbone.",
    embedding="embeddings",
    final_norm="norm_f",
    mixer_norm="norm",
    feed_forward_norm="norm",
    attention="mixer.",
    mlp="mixer.",
    mamba="mixer.",
    fused_qkv="",
    fused_gate_up="",
    recurrent=MAMBA_MATRICES,
)


def one_part_architecture() -> Architecture:
    from penstock.engine.models.one_part import ONE_PART

    return ONE_PART


def _fields(raw: HFConfig) -> ConfigFields:
    layers, bias, eps = layer_count(raw), flag(raw, "use_bias"), number(raw, "layer_norm_epsilon")
    inner = integer(raw, "expand") * integer(raw, "hidden_size")
    mamba = MambaConfig(
        layers=(True,) * layers,
        heads=integer(raw, "num_heads"),
        head_dim=integer(raw, "head_dim"),
        groups=integer(raw, "n_groups"),
        state=integer(raw, "state_size"),
        conv=integer(raw, "conv_kernel"),
        conv_bias=flag(raw, "use_conv_bias"),
        in_bias=bias,
        out_bias=bias,
        norm_groups=1,
        norm_eps=eps,
        dt_range=time_step_range(raw),
    )
    part: LayerPart = "mixer"
    if mamba.inner != inner:
        raise CheckpointError(
            f"{mamba.heads} heads (num_heads) of {mamba.head_dim} do not make up the width of the layers, {inner}"
        )
    return {
        "mamba": mamba,
        "only": (part,) * layers,
        # There is no attention. What asks for its heads is told of these.
        "num_heads": mamba.heads,
        "num_kv_heads": mamba.heads,
        "head_dim": mamba.head_dim + mamba.head_dim % 2,
        "ffn_size": 0,
        "max_positions": LONGEST,
        "rms_eps": eps,
        "rope": NO_ROPE,
    }


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    heads, size = ssm_sizes(keys)
    return {
        **one_part_from_gguf(keys, config),
        "num_heads": heads,
        "head_dim": size,
        "state_size": keys.whole("ssm.state_size", 0),
        "expand": expansion(heads * size, config),
    }


def one_part_from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    """What Nemotron-H has too."""
    return {
        "n_groups": keys.whole("ssm.group_count", 0),
        "conv_kernel": keys.whole("ssm.conv_kernel", 0),
        "use_bias": config["mamba_proj_bias"],
        "use_conv_bias": config["mamba_conv_bias"],
        "layer_norm_epsilon": config["rms_norm_eps"],
    }


MAMBA2 = Family(
    model_type="mamba2",
    class_name="Mamba2ForCausalLM",
    fields=_fields,
    reads=UNUSED
    | {
        "num_heads",
        "n_groups",
        "state_size",
        "conv_kernel",
        "use_bias",
        "use_conv_bias",
        "layer_norm_epsilon",
        "time_step_limit",
    },
    limits={"hidden_act": SILU},
    names=NAMES,
    gguf=GGUFFormat(architectures=("mamba2",), mamba=True, attention=False, config=_from_gguf, reads=SSM_KEYS),
    architecture=one_part_architecture,
)
