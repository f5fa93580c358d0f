"""The keys of `quantization_config`, method by method: which are honoured, with which values, and which are inert.

References: the configuration classes of transformers, GPTQModel's for what it adds to GPTQ files, and the schema of
compressed-tensors. Which matrices are quantized is read off the tensors themselves, so lists of modules to skip are
inert. So is how inputs were meant to be rounded to 8 bits or more: they are never rounded more coarsely than that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.loading.keys import KeyRules
from penstock.errors import CheckpointError

FP8 = KeyRules(
    reader="FP8 checkpoints",
    read={"quant_method", "weight_block_size", "expert_dtype"},
    limited={
        "activation_scheme": ("dynamic", "static", None),
        "fmt": ("e4m3", "float8_e4m3fn", None),  # older files; the tensors say it anyway
        "scale_fmt": ("float", "ue8m0", None),
    },
    inert={
        "dequantize",  # a choice of the program that loads it
        "ignored_layers",
        "kv_cache_scheme",
        "modules_to_convert",
        "modules_to_not_convert",
    },
    strict=True,
)

MXFP4 = KeyRules(
    reader="MXFP4 checkpoints",
    read={"quant_method"},
    inert={"dequantize", "modules_to_not_convert"},
    strict=True,
)

_QUANTIZING = {
    "act_group_aware", "auto_forward_data_parallel", "autotune", "backend", "batch_size", "block_name_to_quantize",
    "cache_block_outputs", "cache_examples_on_gpu", "compute_device_filter", "damp_auto_increment", "damp_percent",
    "dataset", "dense_vram_strategy", "desc_act", "device", "disable_exllama", "exllama_config", "failsafe",
    "failsafe_strategy", "fallback", "fail_safe", "foem", "gc_mode", "gptaq", "gptaq_alpha", "gptaq_memory_device",
    "hessian", "hyb_act", "max_input_length", "meta", "model_file_base_name", "model_name_or_path", "model_seqlen",
    "module_name_preceding_first_block", "modules_in_block_to_quantize", "moe", "mock_quantization", "mse",
    "offload_to_disk", "offload_to_disk_path", "pack_impl", "pad_token_id", "parallel_packing", "quant_method",
    "quantizer", "static_groups", "sym", "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama", "v2",
    "v2_alpha", "v2_memory_device", "vram_strategy", "wait_for_submodule_finalizers",
}  # fmt: skip
"""Of GPTQ and AWQ files: how they were made, and wishes about kernels. `sym` and `desc_act` show in the tensors."""

GPTQ = KeyRules(
    reader="GPTQ checkpoints",
    read={"bits", "group_size", "dynamic"},
    limited={
        "adapter": (None, {}),  # a low-rank correction beside the weights
        "checkpoint_format": ("gptq", "gptq_v2", None),
        "format": ("gptq", "gptq_v2", None),
        "is_marlin_format": (False, None),
        "lm_head": (False, True, None),  # a quantized head is read like any matrix
        "pack_dtype": ("int32", None),
        "rotation": (None, "", False),
    },
    inert=_QUANTIZING,
    strict=True,
)

AWQ = KeyRules(
    reader="AWQ checkpoints",
    read={"bits", "w_bit", "group_size", "q_group_size", "version", "format"},
    limited={
        "adapter": (None, {}),
        "checkpoint_format": ("gemm", "gptq", None),  # "gptq": the default of the class that transformers inherits from
        "dynamic": (None, {}),
        "lm_head": (False, True, None),
        "pack_dtype": ("int32", None),
        "rotation": (None, "", False),
        "zero_point": (True, None),
    },
    inert=_QUANTIZING | {"do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse", "modules_to_not_convert"},
    strict=True,
)

COMPRESSED = KeyRules(
    reader="compressed-tensors checkpoints",
    reference={"moe_sparsity_config": None},
    read={"config_groups", "format", "kv_cache_scheme", "sparsity_config"},
    limited={"transform_config": (None, {}, {"config_groups": {}})},
    inert={
        "dequantize",
        "global_compression_ratio",
        "ignore",
        "quant_method",
        "quantization_status",
        "run_compressed",
        "use_optimized_inference",
        "version",
    },
    strict=True,
)
_SPARSITY = KeyRules(
    reader="compressed-tensors checkpoints",
    limited={"format": ("dense", None)},
    inert={"global_sparsity", "ignore", "registry_requires_subclass", "sparsity_structure", "targets"},
    strict=True,
)
_SCHEME = KeyRules(
    reader="compressed-tensors checkpoints",
    reference={"output_activations": None},
    read={"weights", "input_activations", "format"},
    inert={"targets"},
    strict=True,
)
_NUMBERS_INERT = {"observer", "observer_kwargs", "scale_dtype", "zp_dtype"}
_WEIGHTS = KeyRules(
    reader="compressed-tensors checkpoints",
    read={"num_bits", "type", "strategy", "group_size", "block_structure", "symmetric", "actorder"},
    limited={"dynamic": (False, None)},
    inert=_NUMBERS_INERT,
    strict=True,
)
_INPUTS = KeyRules(
    reader="compressed-tensors checkpoints",
    limited={"num_bits": (8, 16)},
    inert=_NUMBERS_INERT | {"type", "strategy", "group_size", "block_structure", "symmetric", "dynamic", "actorder"},
    strict=True,
)
_CACHE = KeyRules(
    reader="compressed-tensors checkpoints",
    limited={"num_bits": (8,), "type": ("float",), "strategy": ("tensor", "attn_head", None), "dynamic": (False, True)},
    inert=_NUMBERS_INERT | {"group_size", "block_structure", "symmetric", "actorder"},
    strict=True,
)


def check_compressed(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Every key of a compressed-tensors configuration; how each of its groups stores weights."""
    COMPRESSED.check(settings, "quantization_config")
    if sparsity := _object(settings.get("sparsity_config"), "sparsity_config"):
        _SPARSITY.check(sparsity, "sparsity_config")
    if cache := _object(settings.get("kv_cache_scheme"), "kv_cache_scheme"):
        _CACHE.check(cache, "kv_cache_scheme")
    found = []
    for name, scheme in _object(settings.get("config_groups"), "config_groups").items():
        if isinstance(scheme, list):
            raise CheckpointError(f"config_groups: {name!r} names a preset, which is not supported; spell it out")
        scheme = _object(scheme, f"config_groups.{name}")
        _SCHEME.check(scheme, f"config_groups.{name}")
        weights = _object(scheme.get("weights"), f"config_groups.{name}.weights")
        if not weights:
            raise CheckpointError(f"config_groups.{name} quantizes activations but no weights, which is not supported")
        _WEIGHTS.check(weights, f"config_groups.{name}.weights")
        if inputs := _object(scheme.get("input_activations"), f"config_groups.{name}.input_activations"):
            _INPUTS.check(inputs, f"config_groups.{name}.input_activations")
        if scheme.get("format") not in (None, settings.get("format")):
            raise CheckpointError(f"config_groups.{name} has a format of its own, {scheme['format']!r}; not supported")
        found.append(weights)
    return found


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"quantization_config: {where} must be an object, found {value!r:.80}")
    return value


def whole_number(settings: Mapping[str, Any], key: str, default: int) -> int:
    """An integer of the settings; null means the default."""
    value = settings.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise CheckpointError(f"quantization_config: {key} must be an integer, found {value!r:.80}")
    return value


def pair(value: Any, key: str) -> tuple[int, int]:
    """Two positive integers: the sides of a tile."""
    if isinstance(value, str):
        value = [int(part) if part.isdecimal() else part for part in value.split("x")]
    if (
        not isinstance(value, list | tuple)
        or len(value) != 2
        or not all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in value)
    ):
        raise CheckpointError(f"quantization_config: {key} must be two positive integers, found {value!r:.80}")
    return value[0], value[1]
