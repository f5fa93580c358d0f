"""Few-bit checkpoints as they are published: GPTQ, AWQ and compressed-tensors.

`quantization_config` of `config.json` says which; a tensor that is not quantized has its own name. `tensor`
dequantizes a weight; `groups` returns its integers, which kernels run on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.engine.loading.fp8 import Fp8Checkpoint, kv_scale
from penstock.engine.loading.fp8_experts import Fp4ExpertsCheckpoint, expert_dtype
from penstock.engine.loading.groups import IntGroups, consecutive, from_zero_points, in_groups
from penstock.engine.loading.packed_words import unpack, unpack_awq
from penstock.engine.loading.quantization_keys import AWQ, GPTQ, MXFP4, check_compressed, whole_number
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
    input: with activation order, groups are spread over the inputs. `dynamic` gives some matrices other bits and
    groups: both are read off the tensors."""

    marker = "qweight"
    extras: tuple[str, ...] = ("qzeros", "scales", "g_idx")

    def __init__(self, settings: dict[str, Any]) -> None:
        GPTQ.check(settings, "quantization_config")
        self.bits = whole_number(settings, "bits", 4)
        if self.bits not in (4, 8):
            raise CheckpointError(f"GPTQ with {self.bits} bits is not supported; supported: 4 and 8")
        self.group_size = whole_number(settings, "group_size", 128)
        self.dynamic = bool(settings.get("dynamic"))
        # The newer name wins, as in the reference.
        form = settings.get("checkpoint_format") or settings.get("format")
        self.shift = 0 if form == "gptq_v2" else 1

    def read(self, base: str, names: Collection[str], fetch: Fetch) -> IntGroups:
        scales, packed_zeros = fetch(f"{base}scales"), fetch(f"{base}qzeros")
        _check(base, scales.dim() == packed_zeros.dim() == 2 and scales.shape[1] > 0)
        bits = self._bits(base, packed_zeros.shape[1], scales.shape[1])
        quants = unpack(_words(base, fetch(f"{base}qweight")), bits, 0).T
        zeros = (unpack(_words(base, packed_zeros), bits, 1).int() + self.shift) & ((1 << bits) - 1)
        _check(base, quants.numel() > 0 and quants.shape[0] == scales.shape[1] and scales.shape == zeros.shape)
        inputs = quants.shape[1]
        if self.dynamic:
            if f"{base}g_idx" not in names:
                raise CheckpointError(
                    f"{base}g_idx is missing: with `dynamic` it alone says how the inputs are grouped"
                )
            group_of = fetch(f"{base}g_idx").long()
        else:
            group_of = consecutive(inputs, self.group_size, quants.device)
            _check(base, int(group_of[-1]) + 1 == scales.shape[0])
            if f"{base}g_idx" in names:
                group_of = fetch(f"{base}g_idx").long()
        _check(base, _is_grouping(group_of, inputs, scales.shape[0]))
        return from_zero_points(quants, scales.T, zeros.T, bits, group_of)

    def _bits(self, base: str, words: int, outputs: int) -> int:
        if not self.dynamic or words * 32 == outputs * self.bits:
            return self.bits
        bits = words * 32 // outputs
        if bits not in (4, 8) or words * 32 != outputs * bits:
            raise CheckpointError(f"{base.rstrip('.')!r} has {words * 32 / outputs:g} bits; supported: 4 and 8")
        return bits


class Awq:
    """`qweight` and `qzeros` packed along outputs in an order of their own; zero points as they are."""

    marker = "qweight"
    extras: tuple[str, ...] = ("qzeros", "scales")

    def __init__(self, settings: dict[str, Any]) -> None:
        AWQ.check(settings, "quantization_config")
        bits = whole_number(settings, "bits" if "bits" in settings else "w_bit", 4)
        named = (settings.get(key) for key in ("version", "format"))
        version = str(next((name for name in named if name is not None), "gemm")).lower()
        if bits != 4 or version != "gemm":
            raise CheckpointError(f"AWQ of version {version!r} with {bits} bits is not supported; supported: gemm, 4")
        self.group_size = whole_number(settings, "group_size" if "group_size" in settings else "q_group_size", 128)

    def read(self, base: str, names: Collection[str], fetch: Fetch) -> IntGroups:
        quants = unpack_awq(_words(base, fetch(f"{base}qweight"))).T
        scales = fetch(f"{base}scales")
        zeros = unpack_awq(_words(base, fetch(f"{base}qzeros")))
        _check(base, scales.shape == zeros.shape and scales.shape[1] == quants.shape[0])
        group_of = consecutive(quants.shape[1], self.group_size, quants.device)
        _check(base, _is_grouping(group_of, quants.shape[1], scales.shape[0]))
        return from_zero_points(quants, scales.T, zeros.T, 4, group_of)


class PackedInts:
    """compressed-tensors `pack-quantized`: offset binary packed along inputs; zero points packed along outputs."""

    marker = "weight_packed"
    extras: tuple[str, ...] = ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")

    def __init__(self, bits: int, schemes: Sequence[Mapping[str, Any]]) -> None:
        self.bits = bits
        self._sizes = _group_sizes(schemes)
        self._needs_order = all(scheme.get("actorder") in (True, "group", "dynamic") for scheme in schemes)
        self._needs_zeros = all(scheme.get("symmetric") is False for scheme in schemes)

    def read(self, base: str, names: Collection[str], fetch: Fetch) -> IntGroups:
        shape = fetch(f"{base}weight_shape").flatten().tolist()
        _check(base, len(shape) == 2 and all(size > 0 for size in shape))
        out, inputs = (int(n) for n in shape)
        quants = unpack(_words(base, fetch(f"{base}weight_packed")), self.bits, 1)[:, :inputs]
        scale = _by_row(base, fetch(f"{base}weight_scale"), out)
        _check(base, quants.shape == (out, inputs))
        zero = torch.full(scale.shape, 1 << (self.bits - 1), device=scale.device)
        if f"{base}weight_zero_point" in names:
            zero = unpack(_words(base, fetch(f"{base}weight_zero_point")), self.bits, 0)[:out]
            _check(base, zero.shape == scale.shape)
        elif self._needs_zeros:
            raise CheckpointError(f"{base}weight_zero_point is missing, though the weights are not symmetric")
        group_of = _even_groups(base, inputs, scale.shape[1], self._sizes, quants.device)
        if f"{base}weight_g_idx" in names:
            given = fetch(f"{base}weight_g_idx").long()
            if bool((given >= 0).all()):  # -1 stands for no order
                group_of = given
        elif self._needs_order:
            raise CheckpointError(f"{base}weight_g_idx is missing, though the weights are in activation order")
        _check(base, _is_grouping(group_of, inputs, scale.shape[1]))
        return from_zero_points(quants, scale, zero, self.bits, group_of)


class PlainInts:
    """compressed-tensors `int-quantized`: int8 numbers as they are, a scale for the tensor, the row or the group."""

    marker = "weight"
    extras: tuple[str, ...] = ("weight_scale", "weight_zero_point", "input_scale", "input_zero_point", "weight_g_idx")

    def __init__(self, schemes: Sequence[Mapping[str, Any]]) -> None:
        self._sizes = _group_sizes(schemes)
        self._needs_zeros = all(scheme.get("symmetric") is False for scheme in schemes)

    def read(self, base: str, names: Collection[str], fetch: Fetch) -> IntGroups:
        quants = fetch(f"{base}weight")
        if quants.dtype != torch.int8 or quants.dim() != 2:
            raise CheckpointError(f"{base}weight is {quants.dtype}, not int8: it was saved before it was compressed")
        if f"{base}weight_g_idx" in names:
            raise CheckpointError(f"{base}weight_g_idx: activation order of int8 weights is not supported")
        out, inputs = quants.shape
        scale = _by_row(base, fetch(f"{base}weight_scale").float(), out)
        zero = None
        if f"{base}weight_zero_point" in names:
            zero = _by_row(base, fetch(f"{base}weight_zero_point").float(), out)
            _check(base, zero.shape == scale.shape)
        elif self._needs_zeros:
            raise CheckpointError(f"{base}weight_zero_point is missing, though the weights are not symmetric")
        group_of = _even_groups(base, inputs, scale.shape[1], self._sizes, quants.device)
        low = -scale * zero if zero is not None and bool(zero.any()) else None
        return in_groups(quants, scale, low, 8, group_of)


def _group_sizes(schemes: Sequence[Mapping[str, Any]]) -> set[int]:
    """The group sizes that a configuration allows; one that it cannot honour is refused."""
    sizes = set()
    for scheme in schemes:
        size = whole_number(scheme, "group_size", -1)
        strategy = scheme.get("strategy") or ("group" if size > 0 else "channel")
        if strategy == "group" and size > 0:
            sizes.add(size)
        elif strategy not in ("tensor", "channel"):
            raise CheckpointError(
                f"integers with strategy {strategy!r} and group_size {size} are not supported; supported: tensor, "
                "channel, and group with its size"
            )
    return sizes


def _even_groups(base: str, inputs: int, groups: int, sizes: Collection[int], device: torch.device) -> Tensor:
    """The group of each input: all of them where there is one group, else by the size that fits."""
    if groups == 1:
        return torch.zeros(inputs, dtype=torch.int64, device=device)
    fitting = {size for size in sizes if -(-inputs // size) == groups}
    if len(fitting) != 1:
        raise CheckpointError(
            f"{base.rstrip('.')!r} has {groups} scales for {inputs} inputs, which does not fit groups of "
            f"{', '.join(map(str, sorted(sizes))) or 'all inputs'}"
        )
    return consecutive(inputs, fitting.pop(), device)


def _by_row(base: str, numbers: Tensor, out: int) -> Tensor:
    """[out, groups], from numbers for the tensor, the row, or the row and group."""
    if numbers.numel() == 1:
        return numbers.reshape(1, 1).expand(out, 1)
    _check(base, numbers.dim() in (1, 2) and numbers.shape[0] == out)
    return numbers.reshape(out, -1)


def _is_grouping(group_of: Tensor, inputs: int, groups: int) -> bool:
    """Whether it says for each input which of the groups it is in, and no group is empty."""
    if tuple(group_of.shape) != (inputs,) or not inputs or int(group_of.min()) < 0 or int(group_of.max()) >= groups:
        return False
    return bool((torch.bincount(group_of, minlength=groups) > 0).all())


def _words(base: str, packed: Tensor) -> Tensor:
    _check(base, packed.dtype == torch.int32 and packed.dim() == 2)
    return packed


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

    @property
    def folder(self) -> Path | None:
        """Of its files; None where it has none."""
        return getattr(self._inner, "folder", None)

    @property
    def integer_matrices(self) -> Collection[str]:
        """The tensors that are stored as integers, each [out, in]."""
        return {f"{base}weight" for base in self._bases}

    def names(self) -> Collection[str]:
        hidden = {f"{base}{extra}" for base in self._bases for extra in (self._layout.marker, *self._layout.extras)}
        return (self._names - hidden) | set(self.integer_matrices)

    def groups(self, name: str, device: str | torch.device = "cpu") -> IntGroups | None:
        """The integers of a quantized matrix, None for any other tensor."""
        base = name.removesuffix("weight")
        if base == name or base not in self._bases:
            return None
        return self._layout.read(base, self._names, lambda part: self._fetch(part, device))

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        found = self.groups(name, device)
        return self._inner.tensor(name, device) if found is None else found.dense()

    def kv_scale(self, attention: str) -> tuple[float, float]:
        """Scales of a layer's cached keys and values; 1 where the checkpoint has none."""
        return kv_scale(self, self.names(), attention)

    def _fetch(self, name: str, device: str | torch.device) -> Tensor:
        if name not in self._names:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}; it is incomplete")
        return self._inner.tensor(name, device)


def read_quantized(checkpoint: Source) -> Source:
    """`checkpoint` itself, or a reader of the few-bit layout its configuration announces."""
    settings = checkpoint.config.get("quantization_config")
    if not settings:
        stray = next((name for name in checkpoint.names() if name.endswith(_SIGNS)), None)
        if stray is not None:
            raise CheckpointError(
                f"the checkpoint holds quantized weights ({stray!r}), but its config.json has no quantization_config"
            )
        return checkpoint
    if not isinstance(settings, dict):
        raise CheckpointError(f"quantization_config must be an object, found {settings!r:.80}")
    method = settings.get("quant_method")
    if method == "fp8":
        in_four_bits = expert_dtype(checkpoint.config) == "fp4"
        return Fp4ExpertsCheckpoint(checkpoint) if in_four_bits else Fp8Checkpoint(checkpoint)
    if method == "gptq":
        return QuantizedCheckpoint(checkpoint, Gptq(settings))
    if method == "awq":
        return QuantizedCheckpoint(checkpoint, Awq(settings))
    if method == "mxfp4":
        MXFP4.check(settings, "quantization_config")
        return checkpoint  # stacks of experts, which `StackedExperts` reads
    if method == "compressed-tensors":
        return _compressed(checkpoint, settings)
    raise CheckpointError(
        f"weights quantized with {method!r:.80} are not supported; supported are gptq, awq, compressed-tensors, fp8 "
        "and mxfp4 checkpoints, unquantized ones, and GGUF"
    )


_SIGNS = (".weight_scale", ".weight_scale_inv", ".qweight", ".weight_packed", "_proj_blocks")
"""How tensors end that only quantized checkpoints have."""


def _compressed(checkpoint: Source, settings: dict[str, Any]) -> Source:
    schemes = check_compressed(settings)
    kinds = {(str(scheme.get("type", "int")), whole_number(scheme, "num_bits", 8)) for scheme in schemes}
    form = settings.get("format")
    if kinds == {("float", 8)} and form in ("float-quantized", "naive-quantized"):
        return Fp8Checkpoint(checkpoint)
    if len(kinds) == 1 and form == "pack-quantized" and kinds <= {("int", 4), ("int", 8)}:
        return QuantizedCheckpoint(checkpoint, PackedInts(4 if ("int", 4) in kinds else 8, schemes))
    if kinds == {("int", 8)} and form in ("int-quantized", "naive-quantized"):
        return QuantizedCheckpoint(checkpoint, PlainInts(schemes))
    described = ", ".join(sorted(f"{kind}{bits}" for kind, bits in kinds)) or "no weights"
    raise CheckpointError(
        f"compressed-tensors of format {form!r:.80} with {described} is not supported; supported: pack-quantized int4 "
        "and int8, int-quantized int8, float-quantized FP8"
    )
