"""Checkpoints that store all experts of a layer as one tensor, under the names of ordinary experts.

`experts.gate_up_proj` is [experts, in, 2 * ffn] and `experts.down_proj` [experts, ffn, out]: inputs before outputs,
gate and up columns one behind the other or alternating (`TensorNames.interleaved_gate_up`). In MXFP4 there are
`*_blocks` [experts, outputs, blocks, 16] and `*_scales` [experts, outputs, blocks] in their place. A stack that was
read to a device is held until something else is asked for: its experts are read one after another.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.engine.backends.host_memory import is_host
from penstock.engine.loading.mxfp4 import BLOCK, Mxfp4
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.errors import CheckpointError

_SUFFIXES = ("", "_bias", "_blocks", "_scales")


@dataclass(frozen=True, slots=True)
class _Part:
    """One tensor of one expert: a slice of a stack."""

    stack: str
    """Name of the stack of weights; biases and blocks add a suffix."""
    expert: int
    step: int = 1
    """Every how many outputs of the stack are this tensor's."""
    first: int = 0
    halves: bool = False
    """Whether the stack holds another tensor behind this one, or before it."""

    def outputs(self, of_expert: Tensor) -> Tensor:
        """Its outputs, along the first axis."""
        if not self.halves:
            return of_expert
        if self.step > 1:
            return of_expert[self.first :: self.step]
        size = of_expert.shape[0] // 2
        return of_expert[self.first * size : (self.first + 1) * size]


class StackedExperts:
    """See the top of the file. Other tensors are those of the inner checkpoint."""

    def __init__(self, inner: Any, names: TensorNames) -> None:
        self.inner = inner
        self.config: dict[str, Any] = inner.config
        self._stored = set(inner.names())
        self._parts: dict[str, _Part] = {}
        self._held: dict[str, Tensor] = {}
        pattern = re.compile(
            rf"(.*{re.escape(names.moe)}experts\.)({names.fused_gate_up}|{names.expert_down})({'|'.join(_SUFFIXES)})"
        )
        self._stacks = {name: found for name in self._stored if (found := pattern.fullmatch(name)) is not None}
        for name, found in self._stacks.items():
            at, module, suffix = found.groups()
            if suffix == "_scales":
                continue
            kind = "bias" if suffix == "_bias" else "weight"
            parts = (names.expert_down,) if module == names.expert_down else names.expert_gate_up
            for expert in range(len(inner.tensor(name))):
                for first, part in enumerate(parts):
                    step = 2 if names.interleaved_gate_up else 1
                    self._parts[f"{at}{expert}.{part}.{kind}"] = _Part(
                        at + module, expert, step if len(parts) == 2 else 1, first, len(parts) == 2
                    )

    def names(self) -> Collection[str]:
        return (self._stored - self._stacks.keys()) | self._parts.keys()

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        part = self._parts.get(name)
        if part is None:
            self._held.clear()
            found: Tensor = self.inner.tensor(name, device)
            return found
        if name.endswith(".bias"):
            return part.outputs(self._stack(f"{part.stack}_bias", device)[part.expert])
        stored = self.mxfp4(name, device)
        if stored is not None:
            return stored.dense()
        return part.outputs(self._stack(part.stack, device)[part.expert].T)

    def mxfp4(self, name: str, device: str | torch.device = "cpu") -> Mxfp4 | None:
        """The matrix as stored; None where it is not in MXFP4."""
        part = self._parts.get(name)
        if part is None or not name.endswith(".weight") or f"{part.stack}_blocks" not in self._stored:
            return None
        if f"{part.stack}_scales" not in self._stored:
            raise CheckpointError(f"the checkpoint has no tensor {part.stack + '_scales'!r}; it is incomplete")
        blocks, scales = (self._stack(f"{part.stack}_{kind}", device) for kind in ("blocks", "scales"))
        if blocks.dtype != torch.uint8 or blocks.dim() != 4 or blocks.shape[3] != BLOCK // 2:
            raise CheckpointError(f"{part.stack}_blocks is {blocks.dtype} {tuple(blocks.shape)}, not blocks of MXFP4")
        scales = scales.view(torch.uint8)
        if scales.shape != blocks.shape[:3]:
            raise CheckpointError(f"{part.stack}_scales is {tuple(scales.shape)} beside blocks {tuple(blocks.shape)}")
        return Mxfp4(part.outputs(blocks[part.expert]).flatten(1), part.outputs(scales[part.expert]))

    def _stack(self, name: str, device: str | torch.device) -> Tensor:
        if name not in self._stored:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}; it is incomplete")
        if is_host(torch.device(device)):
            found: Tensor = self.inner.tensor(name, device)  # a view of the file
            return found
        if name not in self._held:
            layer = name.rpartition("experts.")[0]
            if any(not held.startswith(layer) for held in self._held):
                self._held.clear()
            self._held[name] = self.inner.tensor(name, device)
        return self._held[name]
