"""Blocks that inputs of linears are multiplied by, in an adapter's file: see `adapters.inputs`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from penstock.engine.adapters.inputs import InputBlocks
from penstock.engine.adapters.layout import AdapterCut
from penstock.engine.adapters.peft_config import LoraConfig
from penstock.engine.adapters.vector_tensors import Changed
from penstock.errors import CheckpointError

BLOCKS = "input_blocks"
"""What they are called here: float32 [blocks, size, size]."""
_KEY = re.compile(rf"(?:.*\.)?(?:layers|h|blocks)\.(\d+)\.([\w.]+)\.{BLOCKS}")


@dataclass(slots=True)
class InputTensors:
    """Collects the tensors of one file, then reads them."""

    file: str
    cut: AdapterCut
    config: LoraConfig
    _keys: list[str] = field(default_factory=list)

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
        """This process's part of them; None: the adapter has none on any rank."""
        if not self._keys:
            return None
        first, last = self.cut.layers
        found: dict[tuple[int, int], list[Tensor | None]] = {}
        for key in sorted(self._keys):
            inside = _KEY.fullmatch(key)
            changed = None if inside is None else find(int(inside[1]), inside[2])
            if changed is None or changed.layer is None:
                raise CheckpointError(
                    f"{self.file}: {self.config.kind} cannot change {key.removesuffix(f'.{BLOCKS}')}, but only linears "
                    "of layers that are no experts; merge the adapter into the model"
                )
            blocks: Tensor = tensors.get_tensor(key)
            site, (low, high) = self.cut.whole.sites[changed.index], self.cut.inputs[changed.index]
            size = blocks.shape[1]
            if blocks.shape[0] * size != site.inputs or blocks.shape[2] != size:
                raise CheckpointError(f"{self.file}: blocks of {key!r} do not fit a linear with {site.inputs} inputs")
            if low % size or high % size:
                raise CheckpointError(
                    f"{self.file}: ranks divide the {site.inputs} inputs of {key!r} inside of blocks of {size}; lower "
                    "tensor_parallel or merge the adapter into the model"
                )
            if not bool(blocks.isfinite().all()):
                raise CheckpointError(f"{self.file}: {key!r} holds values that are not finite")
            hashed(key, blocks)
            if first <= changed.layer < last:
                own = blocks[low // size : high // size].contiguous()
                parts = found.setdefault((changed.layer - first, changed.index), [None] * len(site.sizes))
                for part in changed.parts:
                    parts[part] = own
        return InputBlocks({place: tuple(parts) for place, parts in found.items()})
