"""Blocks that inputs of linears are multiplied by, in an adapter's file: see `adapters.inputs`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from penstock.engine.adapters.inputs import InputBlocks
from penstock.engine.adapters.layout import LAYER, AdapterCut
from penstock.engine.adapters.peft_config import LoraConfig
from penstock.engine.adapters.vector_tensors import Changed
from penstock.errors import CheckpointError

BLOCKS = "input_blocks"
"""What they are called here: float32 [blocks, size, size]."""
_KEY = re.compile(rf"{LAYER}([\w.]+)\.{BLOCKS}")


@dataclass(slots=True)
class InputTensors:
    """Collects the tensors of one file, then reads them."""

    file: str
    cut: AdapterCut
    config: LoraConfig
    _keys: list[str] = field(default_factory=list)
    visits: dict[tuple[int, int], list[dict[int, Tensor]]] | None = None
    """Once they are read: this process's part of those of experts and of `kv_b_proj`, by layer and site (see
    `VisitChange`); None: the adapter has none on any rank."""

    def take(self, key: str) -> bool:
        """Whether a tensor is one of these."""
        if key.endswith(f".{BLOCKS}"):
            self._keys.append(key)
            return True
        return False

    @property
    def any(self) -> bool:
        return bool(self._keys)

    def read(
        self, find: Callable[[int | None, str], Changed | None], tensors: Any, hashed: Callable[[str, Tensor], None]
    ) -> InputBlocks | None:
        """This process's part of them, those of `visits` aside; None: the adapter has none on any rank."""
        if not self._keys:
            return None
        first, last = self.cut.layers
        found: dict[tuple[int, int], list[Tensor | None]] = {}
        plain = False
        for key in sorted(self._keys):
            inside = _KEY.fullmatch(key)
            changed = None if inside is None else find(self.cut.whole.numbered(inside[1], inside[2]), inside[3])
            if changed is None or changed.layer is None:
                raise CheckpointError(
                    f"{self.file}: {self.config.kind} cannot change {key.removesuffix(f'.{BLOCKS}')}, but only linears "
                    "of layers; merge the adapter into the model"
                )
            blocks: Tensor = tensors.get_tensor(key)
            site = self.cut.whole.sites[changed.index]
            _, inputs = changed.shape(self.cut.whole)
            low, high = self.cut.inputs[changed.index + 1 if site.heads else changed.index]
            size = blocks.shape[1]
            if blocks.shape[0] * size != inputs or blocks.shape[2] != size:
                raise CheckpointError(f"{self.file}: blocks of {key!r} do not fit a linear with {inputs} inputs")
            if low % size or high % size:
                raise CheckpointError(
                    f"{self.file}: ranks divide the {inputs} inputs of {key!r} inside of blocks of {size}; lower "
                    "tensor_parallel or merge the adapter into the model"
                )
            if not bool(blocks.isfinite().all()):
                raise CheckpointError(f"{self.file}: {key!r} holds values that are not finite")
            hashed(key, blocks)
            if site.experts and self.visits is None:
                self.visits = {}
            plain = plain or not site.experts
            if first <= changed.layer < last:
                own = blocks[low // size : high // size].contiguous()
                if site.experts:
                    self._keep(changed, changed.layer - first, own)
                    continue
                parts = found.setdefault((changed.layer - first, changed.index), [None] * len(site.sizes))
                for part in changed.parts:
                    parts[part] = own
        return InputBlocks({place: tuple(parts) for place, parts in found.items()}) if plain else None

    def _keep(self, changed: Changed, layer: int, own: Tensor) -> None:
        site = self.cut.whole.sites[changed.index]
        for index in (changed.index, changed.index + 1) if site.heads else (changed.index,):
            assert self.visits is not None
            parts = self.visits.setdefault((layer, index), [{} for _ in self.cut.whole.sites[index].sizes])
            for part in changed.parts:
                parts[part][changed.expert or 0] = own
