"""Norms in an adapter's file: gains of those that were trained as a whole (`modules_to_save`).

Norms that stand between layers are kept (`adapters.norms`), and those of queries and keys (`adapters.head_norms`); any
other module that was saved must be the model's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.engine.adapters.base_tensors import BaseTensors
from penstock.engine.adapters.layout import Span
from penstock.engine.adapters.norms import Norm
from penstock.engine.adapters.peft_config import LoraConfig
from penstock.engine.adapters.spec import CONFIG
from penstock.errors import CheckpointError

_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")
_FORM = re.compile(r"\.(modules_to_save|original_module)(?:\.default)?(?=\.)")


@dataclass(frozen=True, slots=True)
class NormNames:
    """The norms of a model that adapters may replace."""

    final: str
    in_layer: Mapping[str, str]
    """By what files may call them."""
    of_heads: Mapping[str, int]
    """Those of queries and keys: how many gains each has."""
    hidden: int
    offset: float
    """What is added to stored gains."""
    final_offset: float
    """The same of the one behind the last layer."""
    layers: Span
    """Those of this process."""


@dataclass(slots=True)
class NormTensors:
    """Collects the tensors of one file, then reads them."""

    file: str
    config: LoraConfig
    names: NormNames | None
    base: BaseTensors | None
    _keys: dict[str, str] = field(default_factory=dict)

    def take(self, key: str) -> bool:
        """Whether a tensor is of a module that was saved as a whole."""
        name = key.removeprefix("base_model.model.")
        form = _FORM.search(name)
        path = _FORM.sub("", name)
        parts = path.split(".")[:-1]
        modules = [".".join(parts[: count + 1]) for count in range(len(parts))]
        # As PEFT finds them: by the end of their paths, whatever is before it.
        inside = any(module.endswith(self.config.saved) for module in modules)
        if ".lora_" in name or not (inside or form):
            return False
        if form is None or form[1] == "modules_to_save":
            self._keys[path] = key
        return True

    @property
    def any(self) -> bool:
        return bool(self._keys)

    def read(
        self, tensors: Any, hashed: Callable[[str, Tensor], None]
    ) -> tuple[Mapping[Norm, Tensor] | None, Mapping[Norm, Tensor] | None]:
        """Those between layers and those of heads, by norm; None: there are none. Of a rank without these layers it is
        empty."""
        found: tuple[dict[Norm, Tensor], dict[Norm, Tensor]] = {}, {}
        changes = [False, False]
        for path, key in sorted(self._keys.items()):
            value: Tensor = tensors.get_tensor(key)
            own = None if self.base is None else self.base.named(path)
            if own is not None and own.shape == value.shape and torch.equal(own.to(value.dtype), value):
                continue
            norm = self._norm(path)
            if norm is None or self.names is None:
                raise CheckpointError(
                    f"{self.file}: cannot apply {key!r}: of modules_to_save, embedding, head, the norms between "
                    "layers and those of the heads of queries and keys may be changed"
                )
            of_heads = norm[0] is not None and norm[1] in self.names.of_heads
            size = self.names.of_heads[norm[1]] if of_heads else self.names.hidden
            if tuple(value.shape) != (size,):
                raise CheckpointError(f"{self.file}: {key!r} is {tuple(value.shape)}, not ({size},)")
            gains = value.float() + (self.names.final_offset if norm[0] is None else self.names.offset)
            if not bool(gains.isfinite().all()):
                raise CheckpointError(f"{self.file}: {key!r} holds values that are not finite")
            hashed(f"norm {path}", value)
            changes[of_heads] = True
            layer, module = norm
            first, last = self.names.layers
            if layer is None:
                found[0][norm] = gains
            elif first <= layer < last:
                found[of_heads][layer - first, module] = gains
        self._check_declared()
        return found[0] if changes[0] else None, found[1] if changes[1] else None

    def _norm(self, path: str) -> Norm | None:
        if self.names is None:
            return None
        inside = _LAYER.fullmatch(path)
        if inside is not None:
            module = inside[2].removesuffix(".weight")
            module = self.names.in_layer.get(module, module)
            known = (*self.names.in_layer.values(), *self.names.of_heads)
            return (int(inside[1]), module) if module in known else None
        final = path == f"{self.names.final}.weight" or path.endswith(f".{self.names.final}.weight")
        return (None, self.names.final) if final else None

    def _check_declared(self) -> None:
        """PEFT saves every module that it was told to train."""
        known = () if self.names is None else (self.names.final, *self.names.in_layer, *self.names.of_heads)
        for name in self.config.saved:
            if name in known and not any(f".{name}." in f".{path}" for path in self._keys):
                raise CheckpointError(f"{CONFIG}: modules_to_save has {name}, and {self.file} does not")
