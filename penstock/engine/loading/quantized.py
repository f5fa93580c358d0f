"""Few-bit checkpoints as they are published: GPTQ, AWQ and compressed-tensors.

`quantization_config` of `config.json` says which; a tensor that is not quantized has its own name. `tensor`
dequantizes a weight; `groups` returns its integers, which kernels run on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.engine.loading.fp8 import Fp8Checkpoint
from penstock.engine.loading.groups import IntGroups, from_zero_points
from penstock.engine.loading.packed_words import unpack, unpack_awq
from penstock.errors import CheckpointError

Fetch = Callable[[str], Tensor]


class Source(Protocol):
    """The checkpoint as stored."""

    config: dict[str, Any]

    def names(self) -> Collection[str]: ...

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor: ...


class Layout(Protocol):
    """How one method stores a matrix."""

    marker: str
    """What replaces `weight` in the name of a quantized matrix."""
    extras: tuple[str, ...]
    """The other tensors of such a matrix."""

    def read(self, base: str, names: Collection[str], fetch: Fetch) -> IntGroups:
        """The matrix whose tensors are called `base` plus a suffix."""
        ...


class Gptq:
    """`qweight` packed along inputs, `qzeros` packed along outputs and stored minus one, `g_idx` the group of each
    input: with activation order, groups are spread over the inputs."""

    marker = "qweight"
    extras: tuple[str, ...] = ("qzeros", "scales", "g_idx")

    def __init__(self, settings: dict[str, Any]) -> None:
        self.bits = int(settings.get("bits", 4))
        if self.bits not in (4, 8):
            raise CheckpointError(f"GPTQ with {self.bits} bits is not supported; supported: 4 and 8")
        self.shift = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1

    def read(self, base: str, names: Collection[str], fetch: Fetch) -> IntGroups:
        quants = unpack(fetch(f"{base}qweight"), self.bits, 0).T
        zeros = (unpack(fetch(f"{base}qzeros"), self.bits, 1).int() + self.shift) & ((1 << self.bits) - 1)
        scales = fetch(f"{base}scales")
        inputs, groups = quants.shape[1], scales.shape[0]
        _check(base, quants.shape[0] == scales.shape[1] == zeros.shape[1] and inputs % groups == 0)
        order = None
        if f"{base}g_idx" in names:
            group_of = fetch(f"{base}g_idx").long()
            counts = torch.bincount(group_of, minlength=groups)
            _check(base, group_of.numel() == inputs and counts.numel() == groups and bool((counts == counts[0]).all()))
            if not torch.equal(group_of, torch.arange(inputs, device=group_of.device) // (inputs // groups)):
                order = group_of.argsort(stable=True)
                quants = quants[:, order]
        return from_zero_points(quants.contiguous(), scales.T.contiguous(), zeros.T.contiguous(), self.bits, order)


class Awq:
    """`qweight` and `qzeros` packed along outputs in an order of their own; zero points as they are."""

    marker = "qweight"
    extras: tuple[str, ...] = ("qzeros", "scales")

    def __init__(self, settings: dict[str, Any]) -> None:
        bits, version = settings.get("bits", settings.get("w_bit", 4)), str(settings.get("version", "gemm")).lower()
        if bits != 4 or version != "gemm":
            raise CheckpointError(f"AWQ of version {version!r} with {bits} bits is not supported; supported: gemm, 4")

    def read(self, base: str, names: Collection[str], fetch: Fetch) -> IntGroups:
        quants = unpack_awq(fetch(f"{base}qweight")).T.contiguous()
        scales = fetch(f"{base}scales")
        zeros = unpack_awq(fetch(f"{base}qzeros"))
        _check(base, scales.shape == zeros.shape and scales.shape[1] == quants.shape[0])
        _check(base, quants.shape[1] % scales.shape[0] == 0)
        return from_zero_points(quants, scales.T.contiguous(), zeros.T.contiguous(), 4, None)


class PackedInts:
    """compressed-tensors `pack-quantized`: offset binary packed along inputs; zero points packed along outputs."""

    marker = "weight_packed"
    extras: tuple[str, ...] = ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def read(self, base: str, names: Collection[str], fetch: Fetch) -> IntGroups:
        out, inputs = (int(n) for n in fetch(f"{base}weight_shape").tolist())
        quants = unpack(fetch(f"{base}weight_packed"), self.bits, 1)[:, :inputs]
        scale = fetch(f"{base}weight_scale").reshape(out, -1)
        _check(base, quants.shape == (out, inputs) and inputs % scale.shape[1] == 0)
        zero = torch.full(scale.shape, 1 << (self.bits - 1), device=scale.device)
        if f"{base}weight_zero_point" in names:
            zero = unpack(fetch(f"{base}weight_zero_point"), self.bits, 0)[:out]
            _check(base, zero.shape == scale.shape)
        order = None
        if f"{base}weight_g_idx" in names:
            group_of = fetch(f"{base}weight_g_idx").long()
            if bool((group_of >= 0).all()) and bool((group_of.diff() < 0).any()):
                order = group_of.argsort(stable=True)
                quants = quants[:, order]
        return from_zero_points(quants.contiguous(), scale, zero, self.bits, order)


class PlainInts:
    """compressed-tensors `int-quantized`: int8 numbers as they are, a scale for the tensor, the row or the group."""

    marker = "weight"
    extras: tuple[str, ...] = ("weight_scale", "weight_zero_point", "input_scale", "input_zero_point")

    def read(self, base: str, names: Collection[str], fetch: Fetch) -> IntGroups:
        quants = fetch(f"{base}weight")
        out, inputs = quants.shape
        scale = fetch(f"{base}weight_scale").float()
        scale = scale.expand(out).reshape(out, 1) if scale.numel() == 1 else scale.reshape(out, -1)
        _check(base, inputs % scale.shape[1] == 0)
        low = None
        if f"{base}weight_zero_point" in names:
            zero = fetch(f"{base}weight_zero_point").float()
            zero = zero.expand(out).reshape(out, 1) if zero.numel() == 1 else zero.reshape(out, -1)
            low = -scale * zero if bool(zero.any()) else None
        return IntGroups(quants.contiguous(), scale.contiguous(), low, 8)


def _check(base: str, good: bool) -> None:
    if not good:
        raise CheckpointError(f"the quantized tensors of {base.rstrip('.')!r} do not fit together; the file is damaged")


class QuantizedCheckpoint:
    """A checkpoint in few bits, under the names of the unquantized one."""

    def __init__(self, inner: Source, layout: Layout) -> None:
        self._inner = inner
        self._layout = layout
        self.config: dict[str, Any] = {k: v for k, v in inner.config.items() if k != "quantization_config"}
        self._names = set(inner.names())
        marker, sign = f".{layout.marker}", f".{layout.extras[0]}"
        self._bases = {
            name.removesuffix(layout.marker)
            for name in self._names
            if name.endswith(marker) and f"{name.removesuffix(marker)}{sign}" in self._names
        }

    def names(self) -> Collection[str]:
        hidden = {f"{base}{extra}" for base in self._bases for extra in (self._layout.marker, *self._layout.extras)}
        return (self._names - hidden) | {f"{base}weight" for base in self._bases}

    def groups(self, name: str, device: str | torch.device = "cpu") -> IntGroups | None:
        """The integers of a quantized matrix, None for any other tensor."""
        base = name.removesuffix("weight")
        if base == name or base not in self._bases:
            return None
        return self._layout.read(base, self._names, lambda part: self._fetch(part, device))

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        found = self.groups(name, device)
        return self._inner.tensor(name, device) if found is None else found.dense()

    def _fetch(self, name: str, device: str | torch.device) -> Tensor:
        if name not in self._names:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}; it is incomplete")
        return self._inner.tensor(name, device)


def read_quantized(checkpoint: Source) -> Source:
    """`checkpoint` itself, or a reader of the few-bit layout its configuration announces."""
    settings = checkpoint.config.get("quantization_config")
    if not settings:
        return checkpoint
    method = settings.get("quant_method")
    if method == "fp8":
        return Fp8Checkpoint(checkpoint)
    if method == "gptq":
        return QuantizedCheckpoint(checkpoint, Gptq(settings))
    if method == "awq":
        return QuantizedCheckpoint(checkpoint, Awq(settings))
    if method == "compressed-tensors":
        return _compressed(checkpoint, settings)
    raise CheckpointError(
        f"weights quantized with {method!r} are not supported; supported are gptq, awq, compressed-tensors and fp8 "
        "checkpoints, unquantized ones, and GGUF"
    )


def _compressed(checkpoint: Source, settings: dict[str, Any]) -> Source:
    weights = [group.get("weights") or {} for group in settings.get("config_groups", {}).values()]
    kinds = {(w.get("type"), w.get("num_bits")) for w in weights}
    form = settings.get("format")
    if kinds == {("float", 8)}:
        return Fp8Checkpoint(checkpoint)
    if len(kinds) == 1 and form == "pack-quantized" and kinds <= {("int", 4), ("int", 8)}:
        return QuantizedCheckpoint(checkpoint, PackedInts(4 if ("int", 4) in kinds else 8))
    if kinds == {("int", 8)} and form in ("int-quantized", "naive-quantized"):
        return QuantizedCheckpoint(checkpoint, PlainInts())
    described = ", ".join(sorted(f"{kind}{bits}" for kind, bits in kinds)) or "no weights"
    raise CheckpointError(
        f"compressed-tensors of format {form!r} with {described} is not supported; supported: pack-quantized int4 and "
        "int8, int-quantized int8, float-quantized FP8"
    )
