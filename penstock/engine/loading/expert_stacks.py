"""Checkpoints that store a layer's experts as two stacks of ordinary matrices, under the names of ordinary experts.

The stacks are [experts, 2 * ffn, hidden], gate above up, and [experts, hidden, ffn]; `TensorNames.expert_stacks` has
their names. Where experts have no gate, the first is [experts, ffn, hidden]. Gate and up may also be a stack each,
under the name of an expert's matrix without its number. A part of a stack is a view of the file.

Stacks in FP8 have their scales beside them (`_scale`, `_scale_inv`), which are taken apart like the matrices: a number
for each expert, or for the rows or tiles of each.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from penstock.engine.loading.fp8 import SCALES, Tile, tile_of
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.engine.models.wrappers import decoder_keys
from penstock.errors import CheckpointError

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Keys that say how many experts there are."""


class ExpertStacks:
    """See the top of the file. Other tensors are those of the inner checkpoint."""

    def __init__(self, inner: Any, names: TensorNames, experts: int) -> None:
        self.inner = inner
        self.config: dict[str, Any] = inner.config
        self._stored: set[str] = set(inner.names())
        self._parts: dict[str, tuple[str, int, int | None]] = {}
        """By name: the stack, the expert, and which half of its rows."""
        self._scales: dict[str, str] = {}
        """By name of a stack of scales: that of the matrices."""
        assert names.expert_stacks is not None
        gate_up, down = names.expert_stacks
        for name in stacks_among(self._stored, names):
            module = name.removesuffix(".weight")
            own = next((part for part in _alone(names) if module.endswith(f".{part}")), "")
            stack = own or (gate_up if module.endswith(gate_up) else down)
            at = f"{module.removesuffix(stack)}{names.moe}experts."
            scales = {suffix: f"{name}{suffix}" for suffix in SCALES if f"{name}{suffix}" in self._stored}
            self._scales |= dict.fromkeys(scales.values(), name)
            self._stored -= {name, *scales.values()}
            gate, up = names.expert_gate_up
            halves: dict[str, int | None] = {gate: 0, up: 1} if gate else {up: None}
            if stack in (own, down):
                halves = {names.expert_down if stack == down else own.rpartition(".")[2]: None}
            for suffix, whole in {"": name, **scales}.items():
                for expert in range(experts):
                    for part, half in halves.items():
                        self._parts[f"{at}{expert}.{part}.weight{suffix}"] = whole, expert, half

    def names(self) -> Collection[str]:
        return self._stored | self._parts.keys()

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        part = self._parts.get(name)
        if part is None:
            found: Tensor = self.inner.tensor(name, device)
            return found
        stack, expert, half = part
        whole: Tensor = self.inner.tensor(stack)
        if stack in self._scales:
            return self._scale(stack, whole, expert, half).contiguous().to(device)
        if whole.dim() != 3 or expert >= len(whole) or (half is not None and whole.shape[1] % 2):
            raise CheckpointError(f"tensor {stack!r} has shape {tuple(whole.shape)}, not that of a stack of experts")
        matrix = whole[expert]
        if half is not None:
            matrix = matrix.chunk(2)[half]
        return matrix.contiguous().to(device)

    def _scale(self, name: str, whole: Tensor, expert: int, half: int | None) -> Tensor:
        """Of one matrix; whether its shape is right, the matrix decides."""
        if whole.dim() < 1 or expert >= len(whole):
            raise CheckpointError(f"tensor {name!r} has shape {tuple(whole.shape)}, not that of scales of experts")
        scale: Tensor = whole[expert]
        if scale.numel() == 1 or half is None:
            return scale
        rows = self.inner.tensor(self._scales[name]).shape[1]
        if not _in_halves(len(scale), rows, tile_of(self.config)):
            raise CheckpointError(
                f"tensor {name!r} has {len(scale)} rows of scales for {rows} rows of gate and up matrices, some of "
                "which are for rows of both; split it into scales of each"
            )
        return scale.chunk(2)[half]


def _in_halves(scales: int, rows: int, tile: Tile | None) -> bool:
    """Whether the upper half of the scales is for the upper half of the rows, and no other."""
    if scales % 2:
        return False
    if tile is None or scales == rows:
        return True
    half = rows // 2
    return half % tile[0] == 0 or (scales == 2 * -(-half // tile[0]) != -(-rows // tile[0]))


def stacks_among(stored: Collection[str], names: TensorNames) -> list[str]:
    """The stacks of a checkpoint; some families call them weights, some do not."""
    ends = tuple(f".{name}" for name in (*names.expert_stacks, *_alone(names))) if names.expert_stacks else ()
    return [name for name in stored if name.removesuffix(".weight").endswith(ends)]


def _alone(names: TensorNames) -> list[str]:
    """What stacks of gate matrices alone, and of up matrices alone, are called."""
    return [f"{names.moe}experts.{part}" for part in names.expert_gate_up if part]


def with_stacks(checkpoint: Any, names: TensorNames) -> Any:
    """`checkpoint` under the names of single experts, where it has stacks."""
    config = decoder_keys(checkpoint.config)
    experts = next((config[key] for key in _EXPERTS if key in config), 0)
    if names.expert_stacks is None or not isinstance(experts, int) or not stacks_among(checkpoint.names(), names):
        return checkpoint
    return ExpertStacks(checkpoint, names, experts)
