"""Kinds that train inputs: what is put before every prompt, as virtual tokens.

However such rows were trained (as they are, by an encoder, from the rows of real tokens), PEFT stores what it puts
before a prompt. Here they become rows for ids behind the model's vocabulary, and the engine begins each sequence with
those ids. Prefix tuning stores keys and values instead: the rows of its tokens are zeros (`adapters.prefixes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.engine.adapters.end_tensors import VIRTUAL
from penstock.engine.adapters.kinds import rules
from penstock.engine.adapters.kinds.modules import PREFIX, Converted, Tensors
from penstock.engine.adapters.layout import AdapterLayout
from penstock.engine.adapters.peft_config import LoraConfig
from penstock.engine.adapters.prefixes import PREFIX as STORED
from penstock.engine.adapters.spec import CONFIG, WEIGHTS
from penstock.engine.loading.keys import KeyRules
from penstock.errors import CheckpointError

_NAME = "prompt_embeddings"


@dataclass(frozen=True, slots=True)
class Prompts:
    """One kind; see `kinds.read_settings` and `kinds.as_lora`."""

    title: str
    rules: KeyRules
    keys: bool = False
    """Whether keys and values are stored."""

    def settings(self, raw: Mapping[str, Any]) -> LoraConfig:
        count = raw.get("num_virtual_tokens")
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise CheckpointError(f"{CONFIG}: num_virtual_tokens must be a positive integer, found {count!r:.80}")
        return LoraConfig.of_kind(raw, self.title)

    def convert(
        self, raw: Mapping[str, Any], settings: LoraConfig, tensors: Tensors, layout: AdapterLayout
    ) -> tuple[LoraConfig, Tensors]:
        name = next((site.modules[0] for site in layout.sites if site.end == "embedding"), None)
        if name is None:
            raise CheckpointError(
                f"{CONFIG}: {self.title} adapters are not supported on models that run through transformers"
            )
        keys = list(tensors.keys())
        if _NAME not in keys:
            raise CheckpointError(f"{WEIGHTS} has no {_NAME}")
        shape = tuple(tensors.get_slice(_NAME).get_shape())
        count, width = raw["num_virtual_tokens"], raw.get("token_dim")
        if self.keys and isinstance(width, int) and isinstance(raw.get("num_layers"), int):
            width *= 2 * raw["num_layers"]
        if shape[:1] != (count,) or (width is not None and shape != (count, width)):
            raise CheckpointError(f"{WEIGHTS}: {_NAME} is {shape}, and {CONFIG} says ({count}, {width!r})")
        others = [key for key in keys if key != _NAME]
        made: dict[str, Callable[[], Tensor]] = {f"{PREFIX}{name}.{VIRTUAL}": partial(tensors.get_tensor, _NAME)}
        if self.keys:
            hidden = next(site.outputs for site in layout.sites if site.end == "embedding")
            made = {STORED: partial(tensors.get_tensor, _NAME), next(iter(made)): partial(torch.zeros, count, hidden)}
        return replace(settings, ranks={}), Converted(tensors, others, made)


PROMPTS: Mapping[str, Prompts] = {
    "PROMPT_TUNING": Prompts("prompt tuning", rules.PROMPT_TUNING),
    "P_TUNING": Prompts("p-tuning", rules.P_TUNING),
    "CPT": Prompts("CPT", rules.CPT),
    "PREFIX_TUNING": Prompts("prefix tuning", rules.PREFIX_TUNING, keys=True),
    "CARTRIDGE": Prompts("cartridge", rules.CARTRIDGE, keys=True),
}
"""By `peft_type`."""
