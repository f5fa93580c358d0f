"""Mamba-2 layers in GGUF files: which tensors stand for which of the checkpoint's.

The converter stores the decay itself instead of its logarithm, numbers of heads as columns, and the weights of the norm
with a row for each group.
"""

from __future__ import annotations

from penstock.engine.loading.gguf_origin import Origin

_PARTS = {
    "ssm_in.weight": "in_proj.weight",
    "ssm_in.bias": "in_proj.bias",
    "ssm_conv1d.bias": "conv1d.bias",
    "ssm_dt.bias": "dt_bias",
    "ssm_out.weight": "out_proj.weight",
    "ssm_out.bias": "out_proj.bias",
}
_FLAT = {"ssm_d": "D", "ssm_norm.weight": "norm.weight"}


def mamba_origins(name: str, layer: str, at: str) -> dict[str, Origin] | None:
    """The checkpoint's tensor, below `layers.N.`, that the GGUF tensor `name` of a layer stands for; None: it is no
    part of a Mamba layer. `at`: what the names of such a layer begin with."""
    part = name.removeprefix(f"blk.{layer}.")
    if part in _PARTS:
        return {at + _PARTS[part]: Origin(name)}
    if part in _FLAT:
        return {at + _FLAT[part]: Origin(name, flat=True)}
    if part == "ssm_a":
        return {f"{at}A_log": Origin(name, flat=True, log_of_negative=True)}
    if part == "ssm_conv1d.weight":
        return {f"{at}conv1d.weight": Origin(name, depthwise=True)}
    return None
