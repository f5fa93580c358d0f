"""Making a few-bit checkpoint of a model, layer by layer.

GPTQ and AWQ calibrate; int8 and FP8 round to nearest, with one scale per output. The embedding and the head stay as
they are. Sources may be dense checkpoints or few-bit ones, which are dequantized first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.engine.loading.checkpoint import Checkpoint
from penstock.engine.loading.groups import IntGroups
from penstock.engine.loading.parallel import layer_order
from penstock.engine.loading.random_checkpoint import tensor_shapes
from penstock.engine.models.build import FREQUENCIES
from penstock.engine.models.decoder import DecoderLayer
from penstock.engine.models.families import family_of, is_linear, read_config
from penstock.engine.models.layers.attention import Attention
from penstock.engine.models.layers.feed_forward import GatedMlp
from penstock.engine.models.layers.gated_attention import OutputGatedAttention
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.quantization import awq, writer
from penstock.engine.quantization.calibration import ObservedLinear, calibrate
from penstock.engine.quantization.gptq import gptq
from penstock.engine.quantization.grids import SIZES, round_int8, round_zero_point
from penstock.engine.quantization.writer import Method, ShardWriter
from penstock.errors import ConfigError

Progress = Callable[[str, int, int], None]
"""What is being done, how much of it, of how much."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to quantize."""

    method: Method
    group: int | None = None
    """Inputs that share a scale, in 4 bits; the largest of 128, 64 and 32 that fits every matrix when not set."""
    symmetric: bool = False
    """GPTQ: no zero points. Some other programs' kernels are faster with it; the error is larger."""
    act_order: bool = False
    """GPTQ: see `gptq`."""


def matrices_of(config: dict[str, Any], names: Collection[str]) -> set[str]:
    """Those of `names` that are quantized. Gates of whole heads stay as they are: each decides on all of a head."""
    model = read_config(config)
    gate = f".{family_of(model.family).names.output_gate}." if model.gates_by_head else None
    return {name for name in names if is_linear(name) and (gate is None or gate not in name)}


def pick_group(config: dict[str, Any], wanted: int | None) -> int:
    """One group size for all matrices: checkpoints have one."""
    stored = tensor_shapes(config)
    shapes = {stored[name] for name in matrices_of(config, stored)}
    sizes = SIZES if wanted is None else (wanted,)
    for size in sizes:
        if size in SIZES and all(inputs % size == 0 and outputs % 8 == 0 for outputs, inputs in shapes):
            return size
    inputs = ", ".join(str(n) for n in sorted({shape[1] for shape in shapes}))
    raise ConfigError(
        f"matrices with {inputs} inputs cannot be cut into groups of {' or '.join(map(str, sizes))}; "
        f"group sizes are {', '.join(map(str, SIZES))}, or use int8 or fp8"
    )


class RoundedCheckpoint:
    """A model with its matrices rounded to nearest in 4 bits: what a method must beat."""

    def __init__(self, source: Checkpoint, group: int, symmetric: bool = False) -> None:
        self.config: dict[str, Any] = source.config
        self._source = source
        self._matrices = matrices_of(source.config, source.names())
        self._group = group
        self._symmetric = symmetric

    def names(self) -> Collection[str]:
        return self._source.names()

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        tensor = self._source.tensor(name, device)
        if name not in self._matrices:
            return tensor
        return round_zero_point(tensor, self._group, self._symmetric).dense()


def quantize(
    source: Checkpoint,
    recipe: Recipe,
    windows: Sequence[Sequence[int]],
    folder: Path,
    progress: Progress,
    *,
    device: torch.device,
    threads: int,
) -> int:
    """Write the checkpoint; the bytes of its tensors. `windows`: calibration text in token ids, for GPTQ and AWQ."""
    linears = matrices_of(source.config, source.names())
    out = ShardWriter(folder)
    dtype = torch.bfloat16 if _named_dtype(source.config) == "bfloat16" else torch.float16
    if recipe.method in ("int8", "fp8"):
        group, changed = 0, _round_all(source, recipe.method, linears, out, progress, device)
    else:
        group = pick_group(source.config, recipe.group)
        changed = _calibrated(source, recipe, group, windows, out, progress, device, threads)
    for name in sorted(set(source.names()) - linears, key=layer_order):
        tensor = changed.get(name, source.tensor(name))
        # Whole numbers, such as tables of token ids, are not weights: a shorter type would lose their digits. It would
        # lose those of frequencies too, which are multiplied by positions.
        short = tensor.is_floating_point() and not name.endswith(FREQUENCIES)
        out.add(name, tensor.to(dtype) if short else tensor)
    out.close()
    settings = writer.quantization_config(recipe.method, group, recipe.symmetric, recipe.act_order)
    writer.write_config(folder, source.config, settings, dtype)
    return out.size


def _named_dtype(config: dict[str, Any]) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "")


def _round_all(
    source: Checkpoint,
    method: Method,
    linears: Collection[str],
    out: ShardWriter,
    progress: Progress,
    device: torch.device,
) -> dict[str, Tensor]:
    for done, name in enumerate(sorted(linears, key=layer_order)):
        progress("rounding", done, len(linears))
        base, weight = name.removesuffix("weight"), source.tensor(name, device)
        if method == "int8":
            tensors = writer.int8_tensors(base, round_int8(weight, weight.shape[1]))
        else:
            tensors = writer.fp8_tensors(base, weight)
        for part, tensor in tensors.items():
            out.add(part, tensor)
    progress("rounding", len(linears), len(linears))
    return {}


def _calibrated(
    source: Checkpoint,
    recipe: Recipe,
    group: int,
    windows: Sequence[Sequence[int]],
    out: ShardWriter,
    progress: Progress,
    device: torch.device,
    threads: int,
) -> dict[str, Tensor]:
    """Quantize layer after layer; the tensors besides the matrices that changed."""
    model = read_config(source.config)
    changed: dict[str, Tensor] = {}
    stored = source.names()
    left = matrices_of(source.config, source.names())
    by_awq = recipe.method == "awq-int4"

    def rounded(weight: Tensor, hessian: Tensor, tokens: int) -> IntGroups:
        if by_awq:
            return awq.round_clipped(weight, hessian, group)
        return gptq(weight, hessian, tokens, group, symmetric=recipe.symmetric, act_order=recipe.act_order)

    def write(name: str, rows: IntGroups) -> None:
        left.discard(name)
        base = name.removesuffix("weight")
        tensors = writer.awq_tensors(base, rows) if by_awq else writer.gptq_tensors(base, rows)
        for part, tensor in tensors.items():
            out.add(part, tensor)

    def change(layer: DecoderLayer, linears: Sequence[ObservedLinear]) -> DecoderLayer:
        if by_awq:
            layer = _scale(model, layer, group, stored, changed)
        for linear in linears:
            _check_size(linear, group)
            groups = rounded(linear.weight, linear.hessian, linear.tokens)
            linear.weight = groups.dense()
            for name, rows in _rows_of(groups, linear.names):
                write(name, rows)
        return layer

    progress("calibrating", 0, model.num_layers)
    for done in calibrate(source, windows, change, device, threads):
        progress("calibrating", done, model.num_layers)
    # What layers do not multiply their inputs with as it is stored (keys and values of latents): inputs count alike.
    for name in sorted(left, key=layer_order):
        weight = source.tensor(name, device).float()
        write(name, rounded(weight, torch.eye(weight.shape[1], device=device), 0))
    return changed


def _check_size(linear: ObservedLinear, group: int) -> None:
    """Of those matrices, too, whose names do not tell that they are quantized."""
    for name, outputs in linear.names.items():
        if outputs % 8 or linear.inputs % group:
            raise ConfigError(
                f"{name}: {outputs} outputs and {linear.inputs} inputs cannot be cut into groups of {group} inputs, "
                "with a multiple of 8 outputs; use int8 or fp8"
            )


def _rows_of(groups: IntGroups, names: dict[str, int]) -> list[tuple[str, IntGroups]]:
    """The stacked matrices one by one."""
    assert groups.minimum is not None
    found: list[tuple[str, IntGroups]] = []
    at = 0
    for name, size in names.items():
        rows = slice(at, at + size)
        part = IntGroups(groups.quants[rows], groups.scale[rows], groups.minimum[rows], groups.bits, groups.order)
        found.append((name, part))
        at += size
    return found


def _scale(
    model: ModelConfig, layer: DecoderLayer, group: int, stored: Collection[str], changed: dict[str, Tensor]
) -> DecoderLayer:
    """AWQ's scales for one layer, folded into what comes before a matrix; norms go to `changed` as they will be stored.

    A scale can be folded only where nothing else reads what it divides, and where nothing between the two matrices
    depends on the size of a channel. All other matrices, those of experts among them, are clipped and not scaled.
    """
    names = family_of(model.family).names

    def behind_norm(part: str, name: str, linear: ObservedLinear) -> DecoderLayer:
        norm, bias = getattr(layer, f"{part}_norm"), getattr(layer, f"{part}_norm_bias")
        at = f"{_layer_prefix(linear)}{name}"
        if norm is None or model.one_norm or f"{at}.weight" not in stored:  # a norm may have no weights
            return layer
        scales = awq.search_scales(linear.weight, linear.hessian, linear.magnitude, group)
        linear.rescale_inputs(scales)
        changed[f"{at}.weight"] = norm / scales - model.norm_offset
        scaled = {f"{part}_norm": norm / scales}
        if bias is not None:
            changed[f"{at}.bias"] = scaled[f"{part}_norm_bias"] = bias / scales
        return replace(layer, **scaled)

    mixer, feed_forward = layer.mixer, layer.feed_forward
    if isinstance(mixer, Attention) and not isinstance(mixer, OutputGatedAttention):  # whose gate reads the norm, too
        qkv, output, heads = mixer.qkv, mixer.output, mixer.heads
        if isinstance(qkv, ObservedLinear) and isinstance(output, ObservedLinear):
            layer = behind_norm("mixer", names.mixer_norm, qkv)
            # A value's channel comes out of attention as the same channel; with shared KV heads it would be several.
            apart = heads.heads == heads.kv_heads and not heads.shared
            if apart and not heads.normed_values and mixer.clip is None:
                _behind_rows(qkv, output, group)
    if isinstance(feed_forward, GatedMlp):
        gate_up, down = feed_forward.gate_up, feed_forward.down
        if isinstance(gate_up, ObservedLinear) and isinstance(down, ObservedLinear):
            layer = behind_norm("feed_forward", names.feed_forward_norm, gate_up)
            if feed_forward.activation in ("silu", "gelu_tanh"):  # proportional to up
                _behind_rows(gate_up, down, group)
    return layer


def _layer_prefix(linear: ObservedLinear) -> str:
    """Of the names of all tensors of its layer."""
    name = next(iter(linear.names))
    found = re.match(r".*?layers\.\d+\.", name)
    assert found is not None, name
    return found[0]


def _behind_rows(before: ObservedLinear, linear: ObservedLinear, group: int) -> None:
    """Scales of `linear`, folded into the last rows of the linear that makes its inputs: value, or up."""
    if before.bias is not None:
        return
    scales = awq.search_scales(linear.weight, linear.hessian, linear.magnitude, group)
    weight = before.weight.clone()
    weight[-linear.inputs :] /= scales[:, None]
    before.weight = weight
    linear.rescale_inputs(scales)
