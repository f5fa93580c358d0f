"""The tensors of the base model that an adapter's file is compared with or computed from, as its checkpoint has them.

DoRA divides by the length of every row of a matrix with the adapter added, and biases that were trained replace the
model's own. Reading the checkpoint for that, on the thread that reads the adapter, asks nothing of the device, works
for weights in any form, and gives every rank whole rows. Values of a few-bit checkpoint are those that it stands for;
where weights are rounded to fewer bits while they are loaded, those before that.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any, Protocol

from torch import Tensor

from penstock.engine.models.families import family_of
from penstock.engine.models.families.tensor_names import HEADS, prefix_of
from penstock.engine.models.hrm_text import STACKS
from penstock.engine.models.model_config import ModelConfig


class Stored(Protocol):
    """A checkpoint; see `penstock.engine.loading`."""

    def names(self) -> Collection[str]: ...

    def tensor(self, name: str, device: Any = "cpu") -> Tensor: ...


class BaseTensors:
    """Finds tensors by what an adapter's file calls their modules."""

    def __init__(self, stored: Stored, config: ModelConfig) -> None:
        """`stored`: the whole model, also where this process has a part of it."""
        self._stored = stored
        self._config = config

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def family(self) -> str:
        return self._config.family

    @property
    def may_be_transposed(self) -> bool:
        """Whether matrices may be [in, out] where `fan_in_fan_out` says so; of plain linears PEFT corrects it."""
        return self._config.by_transformers

    def of_layer(self, layer: int, modules: Iterable[str], kind: str) -> Tensor | None:
        """`kind` ("weight", "bias") of the first of these modules that the checkpoint has."""
        names = self._stored.names()
        if self._config.by_transformers:
            for module in modules:
                end = re.compile(rf"(?:.*\.)?\D+\.{layer}\.{re.escape(module)}\.{kind}")
                found = [name for name in names if end.fullmatch(name)]
                if len(found) == 1:
                    return self._stored.tensor(found[0])
            return None
        at, cycles = prefix_of(names, family_of(self._config.family).names), self._config.cycles
        if cycles is not None:
            stack, layer = divmod(layer, cycles.layers)
            at = f"{at}{STACKS[stack]}."
        return self._first(f"{at}layers.{layer}.{module}.{kind}" for module in modules)

    def of_embedding(self) -> Tensor | None:
        tensors = family_of(self._config.family).names
        return self._first((f"{prefix_of(self._stored.names(), tensors)}{tensors.embedding}.weight",))

    def of_head(self, kind: str = "weight") -> Tensor | None:
        found = self._first(f"{head}.{kind}" for head in HEADS)
        return self.of_embedding() if found is None and kind == "weight" else found

    def named(self, path: str) -> Tensor | None:
        """A tensor by its path in the model as PEFT wraps it, wherever the checkpoint has the decoder."""
        names = self._stored.names()
        own_name = None if self._config.by_transformers else family_of(self._config.family).own_name
        tail = path if own_name is None else own_name(path) or path
        while tail.count(".") > 1:
            if tail in names:
                return self._stored.tensor(tail)
            found = [name for name in names if name.endswith(f".{tail}")]
            if found:
                return self._stored.tensor(found[0]) if len(found) == 1 else None
            tail = tail.partition(".")[2]
        return None

    def _first(self, names: Iterable[str]) -> Tensor | None:
        stored = self._stored.names()
        return next((self._stored.tensor(name) for name in names if name in stored), None)
