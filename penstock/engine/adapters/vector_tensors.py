"""Magnitudes of DoRA and biases in an adapter's file, made into the scales and shifts of `adapters.vectors`.

With the base's matrix W and bias b, matrices A and B times s, a magnitude m, a trained bias b' and a bias c of B, PEFT
computes m / |W + s B A| * (W x + s B A x) + b' + s c, the length being that of each row. The engine has
y = W x + b + s B A x already, so the scale is m / |W + s B A|, and the shift b' + s c - scale * b. Other kinds of
adapters multiply all that a linear gives, its bias too, or add to it (`adapters.kinds.renamed`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.engine.adapters.base_tensors import BaseTensors
from penstock.engine.adapters.layout import LAYER, AdapterCut, AdapterLayout, Site, rows_of
from penstock.engine.adapters.peft_config import LoraConfig
from penstock.engine.adapters.spec import CONFIG
from penstock.engine.adapters.vectors import SiteVectors
from penstock.engine.adapters.visits import VisitChange
from penstock.errors import CheckpointError

FACTOR, ADDED, SCALE = "output_factor", "output_bias", "output_scale"
"""What vectors of other kinds are called here: one multiplies what a linear gives, one is added to it, and one
multiplies it without its bias."""
_FORMS = (
    (re.compile(rf"\.{SCALE}$"), SCALE),
    (re.compile(rf"\.{FACTOR}$"), FACTOR),
    (re.compile(rf"\.{ADDED}$"), ADDED),
    (re.compile(r"\.lora_magnitude_vector(?:\.default)?(?:\.weight)?$"), "magnitude"),
    (re.compile(r"\.lora_B(?:\.default)?\.bias$"), "lora_bias"),
    (re.compile(r"(?:\.base_layer)?\.bias$"), "bias"),
    (re.compile(r"(?:_bias)$"), "other"),
)
_LAYER = re.compile(LAYER + r"(.+)")
_AT_ONCE = 1 << 24
"""Numbers of a matrix that are widened at the same time."""

Where = tuple[int | None, str]
"""A layer, or none, and the module in it."""


@dataclass(frozen=True, slots=True)
class Changed:
    """A linear that vectors belong to."""

    layer: int | None
    index: int
    """Of its site."""
    parts: range
    names: tuple[str, ...]
    """What the checkpoint may call it."""
    expert: int | None = None
    """Which one's it is, where it is an expert's."""

    @property
    def place(self) -> tuple[int | None, int, int, int | None]:
        return self.layer, self.index, self.parts.start, self.expert

    def shape(self, layout: AdapterLayout) -> tuple[int, int]:
        """Outputs and inputs."""
        site = layout.sites[self.index]
        if site.heads:
            values = layout.sites[self.index + 1]
            return site.experts * (site.inputs + values.outputs), values.inputs
        return sum(site.sizes[part] for part in self.parts), site.inputs


@dataclass(slots=True)
class _Parts:
    """What becomes of the outputs of a linear."""

    of: Changed
    scale: Tensor | None = None
    added: Tensor | None = None
    bias: Tensor | None = None
    factor: Tensor | None = None
    """Of everything, in the end."""


@dataclass(slots=True)
class VectorTensors:
    """Collects the tensors of one file, then makes vectors of them."""

    file: str
    layout: AdapterLayout
    cut: AdapterCut
    config: LoraConfig
    base: BaseTensors | None
    _keys: dict[tuple[int | None, str, str], str] = field(default_factory=dict)
    _parts: dict[tuple[int | None, int, int, int | None], _Parts] = field(default_factory=dict)

    def take(self, key: str) -> bool:
        """Whether a tensor is one of these."""
        for pattern, kind in _FORMS:
            found = pattern.search(key)
            if found is None:
                continue
            path = key if kind == "other" else key[: found.start()]
            path = path.removeprefix("base_model.model.")
            inside = _LAYER.fullmatch(path)
            where: Where = None, path
            if inside is not None:
                where = self.cut.whole.numbered(inside[1], inside[2]), inside[3]
            self._keys[(*where, kind)] = key
            return True
        return False

    @property
    def any(self) -> bool:
        return bool(self._keys)

    def target(
        self, changed: Changed, module: str, tensors: Any, a: Tensor, b: Tensor, scale: float,
        hashed: Callable[[str, Tensor], None],
    ) -> None:  # fmt: skip
        """Take what belongs to a pair of matrices."""
        magnitude = self._taken(changed.layer, module, "magnitude", tensors)
        bias = self._taken(changed.layer, module, "lora_bias", tensors)
        where = module if changed.layer is None else f"layer {changed.layer} {module}"
        for found, wanted, name, key in (
            (magnitude, self.config.dora, "lora_magnitude_vector", "use_dora"),
            (bias, self.config.biased, "lora_B.bias", "lora_bias"),
        ):
            if wanted is (found is None):
                has = "no" if wanted else "a"
                raise CheckpointError(f"{self.file}: {where} has {has} {name}, but {CONFIG} has {key}: {wanted}")
        if magnitude is None and bias is None:
            return
        outputs, inputs = changed.shape(self.cut.whole)
        parts = self._parts.setdefault(changed.place, _Parts(changed))
        if magnitude is not None:
            magnitude = magnitude.flatten()  # some releases of PEFT kept it as a column or a row
            self._check(magnitude, outputs, where)
            hashed(f"{where} magnitude", magnitude)
            weight = self._weight(changed, where)
            if tuple(weight.shape) != (outputs, inputs):
                raise CheckpointError(
                    f"{self.file}: the model's {where} is {tuple(weight.shape)}, which DoRA does not fit"
                )
            parts.scale = magnitude.float() / _lengths(weight, a.float(), b.float(), scale)
        if bias is not None:
            self._check(bias, outputs, where)
            hashed(f"{where} bias of B", bias)
            parts.added = bias.float() * scale

    def outputs(
        self, find: Callable[[int | None, str], Changed | None], tensors: Any, hashed: Callable[[str, Tensor], None]
    ) -> None:
        """Take the vectors that kinds other than LoRA have for what a linear gives."""
        for layer, module, kind in sorted(self._keys, key=str):
            if kind not in (FACTOR, ADDED, SCALE):
                continue
            where = module if layer is None else f"layer {layer} {module}"
            vector: Tensor = tensors.get_tensor(self._keys.pop((layer, module, kind)))
            changed = find(layer, module)
            if changed is None:
                raise CheckpointError(
                    f"{self.file}: {self.config.kind} cannot change {where}, but only the head and linears of layers; "
                    "merge the adapter into the model"
                )
            self._check(vector, changed.shape(self.cut.whole)[0], where)
            hashed(f"{where} {kind}", vector)
            parts = self._parts.setdefault(changed.place, _Parts(changed))
            if kind == FACTOR:
                parts.factor = vector.float()
            elif kind == SCALE:
                parts.scale = vector.float()
            else:
                parts.added = vector.float()

    def add(self, changed: Changed, vector: Tensor) -> None:
        """Add to what a linear gives, beside what the file says."""
        parts = self._parts.setdefault(changed.place, _Parts(changed))
        parts.added = vector if parts.added is None else parts.added + vector

    def biases(
        self, find: Callable[[int | None, str], Changed | None], tensors: Any, hashed: Callable[[str, Tensor], None]
    ) -> None:
        """Take the biases that replace the model's own; those of no linear here must be the model's own."""
        for layer, module, kind in sorted(self._keys, key=str):
            if kind not in ("bias", "other"):
                continue
            key = self._keys[layer, module, kind]
            where = module if layer is None else f"layer {layer} {module}"
            bias: Tensor = tensors.get_tensor(key)
            changed = find(layer, module) if kind == "bias" else None
            if changed is not None:
                own = self._own_bias(changed)
                if own is not None and own.shape == bias.shape and torch.equal(own.to(bias.dtype), bias):
                    continue
            if changed is None:
                path = key.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".default", "")
                own = None if self.base is None else self.base.named(path)
                if own is not None and own.shape == bias.shape and torch.equal(own.to(bias.dtype), bias):
                    continue
                raise CheckpointError(
                    f"{self.file}: the bias of {where} is not the model's own; adapters may change biases of linears "
                    "that they may target"
                )
            self._check(bias, changed.shape(self.cut.whole)[0], where)
            hashed(f"{where} bias", bias)
            self._parts.setdefault(changed.place, _Parts(changed)).bias = bias.float()
        used = {(layer, module) for layer, module, kind in self._keys if kind in ("magnitude", "lora_bias")}
        if used:
            layer, module = sorted(used, key=str)[0]
            raise CheckpointError(
                f"{self.file}: {module} has a magnitude or a bias of lora_B, and no lora_A and lora_B"
            )

    def vectors(self) -> SiteVectors | None:
        """This process's part of them; None: the adapter has none on any rank."""
        plain = [parts for parts in self._parts.values() if not self.cut.whole.sites[parts.of.index].experts]
        if not plain:
            return None
        first = self.cut.layers[0]
        data = torch.zeros(2, self.layout.columns)
        data[0] = 1.0
        touched = set()
        for parts in filter(self._is_here, plain):
            of = parts.of
            placed = self.layout.place(0 if of.layer is None else of.layer - first, of.index)
            self._fill(parts, data[:, placed.column : placed.column + placed.site.outputs], placed.site)
            touched.add((placed.layer, placed.index))
        self._check_finite(data)
        return SiteVectors(data, frozenset(touched))

    def visits(self) -> dict[tuple[int, int], VisitChange] | None:
        """This process's part of those of experts and of `kv_b_proj`, by layer and site; None: the same."""
        first = self.cut.layers[0]
        if not any(self.cut.whole.sites[parts.of.index].experts for parts in self._parts.values()):
            return None
        found: dict[tuple[int, int], VisitChange] = {}
        data: dict[tuple[int, int], Tensor] = {}
        for parts in self._parts.values():
            site = self.layout.sites[parts.of.index]
            if not site.experts or not self._is_here(parts):
                continue
            assert parts.of.layer is not None
            place = parts.of.layer - first, parts.of.index
            if site.heads:
                found |= self._of_heads(parts, place)
                continue
            if place not in data:
                data[place] = torch.zeros(2, site.experts, site.outputs)
                data[place][0] = 1.0
            self._fill(parts, data[place][:, parts.of.expert or 0], site)
        for place, both in data.items():
            self._check_finite(both)
            found[place] = VisitChange(both[0], both[1] if bool(both[1].any()) else None)
        return found

    def _of_heads(self, parts: _Parts, place: tuple[int, int]) -> dict[tuple[int, int], VisitChange]:
        whole, index = self.cut.whole.sites, parts.of.index
        scale, shift = self._scale_and_shift(parts)
        self._check_finite(scale, shift)
        keys = whole[index].inputs
        scales, shifts = (each.view(whole[index].experts, -1)[slice(*self.cut.heads)] for each in (scale, shift))
        return {
            place: VisitChange(scales[:, :keys].contiguous()),
            (place[0], index + 1): VisitChange(scales[:, keys:].contiguous(), shifts[:, keys:].contiguous()),
        }

    def _is_here(self, parts: _Parts) -> bool:
        first, last = self.cut.layers
        return self.layout.ends if parts.of.layer is None else first <= parts.of.layer < last

    def _scale_and_shift(self, parts: _Parts) -> tuple[Tensor, Tensor]:
        outputs, _ = parts.of.shape(self.cut.whole)
        scale = torch.ones(outputs) if parts.scale is None else parts.scale
        shift = torch.zeros(outputs)
        own = self._own_bias(parts.of)
        if own is not None:
            shift += (own if parts.bias is None else parts.bias) - scale * own
        elif parts.bias is not None:
            shift += parts.bias
        if parts.added is not None:
            shift += parts.added
        return (scale, shift) if parts.factor is None else (scale * parts.factor, shift * parts.factor)

    def _fill(self, parts: _Parts, data: Tensor, site: Site) -> None:
        """Scales and shifts of some parts of a linear. `data` [2, outputs]: those of this process, `site` too."""
        of = parts.of
        sizes = [self.cut.whole.sites[of.index].sizes[part] for part in of.parts]
        # Where inputs are cut, outputs are parts of a sum: the shift is in the first of them.
        once = self.cut.inputs[of.index][0] == 0
        spans = self.cut.outputs[of.index]
        both = (torch.split(each, sizes) for each in self._scale_and_shift(parts))
        for part, factor, more in zip(of.parts, *both, strict=True):
            begin = sum(site.sizes[:part])
            some = rows_of(factor, spans[part])
            data[0, begin : begin + len(some)] = some
            if once:
                data[1, begin : begin + len(some)] = rows_of(more, spans[part])

    def _check_finite(self, *vectors: Tensor) -> None:
        if not all(bool(each.isfinite().all()) for each in vectors):
            raise CheckpointError(f"{self.file}: magnitudes or biases hold values that are not finite")

    def _taken(self, layer: int | None, module: str, kind: str, tensors: Any) -> Tensor | None:
        found = next(
            (
                where
                for where in self._keys
                if where[0] == layer and where[2] == kind and (where[1] == module or where[1].endswith(f".{module}"))
            ),
            None,
        )
        if found is None:
            return None
        tensor: Tensor = tensors.get_tensor(self._keys.pop(found))
        return tensor

    def _check(self, vector: Tensor, outputs: int, where: str) -> None:
        if tuple(vector.shape) != (outputs,):
            raise CheckpointError(
                f"{self.file}: a vector of {where} is {tuple(vector.shape)}; on this model it must be ({outputs},)"
            )

    def _weight(self, changed: Changed, where: str) -> Tensor:
        if self.base is None:
            found = None
        elif changed.layer is not None:
            found = self._of_layer(self.base, changed, changed.layer, "weight")
            if found is not None and self.config.transposed and self.base.may_be_transposed:
                found = found.t()
        else:
            end = self.cut.whole.sites[changed.index].end
            found = self.base.of_embedding() if end == "embedding" else self.base.of_head()
            if found is not None and end == "embedding":
                found = found.t()
        if found is None:
            raise CheckpointError(
                f"{CONFIG}: use_dora needs the matrix of {where}, and the checkpoint has none of that name; merge the "
                "adapter into the model"
            )
        return found

    def _own_bias(self, changed: Changed) -> Tensor | None:
        if self.base is None:
            return None
        if changed.layer is None:
            of_head = self.cut.whole.sites[changed.index].end == "head"
            found = self.base.of_head("bias") if of_head else None
        else:
            found = self._of_layer(self.base, changed, changed.layer, "bias")
        return None if found is None else found.float()

    def _of_layer(self, base: BaseTensors, changed: Changed, layer: int, kind: str) -> Tensor | None:
        """What the checkpoint has of a linear, perhaps as rows of one that has others too."""
        found, site = base.of_layer(layer, changed.names, kind), self.cut.whole.sites[changed.index]
        if found is None and site.fused:
            fused = base.of_layer(layer, (site.fused,), kind)
            found = None if fused is None else torch.split(fused, list(site.sizes))[changed.parts.start]
        return found


def _lengths(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Of each row of the matrix with the adapter in it."""
    step = max(1, _AT_ONCE // weight.shape[1])
    rows = [slice(begin, begin + step) for begin in range(0, len(weight), step)]
    return torch.cat([(weight[some].float() + scale * (b[some] @ a)).norm(dim=1) for some in rows])
