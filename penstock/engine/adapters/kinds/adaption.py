"""Adaption prompts (LLaMA-Adapter): their tensors stay as they are, see `adapters.adaption_prompts`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.engine.adapters.kinds import rules
from penstock.engine.adapters.kinds.modules import Tensors
from penstock.engine.adapters.layout import AdapterLayout
from penstock.engine.adapters.peft_config import LoraConfig
from penstock.engine.adapters.spec import CONFIG
from penstock.engine.loading.keys import KeyRules
from penstock.errors import CheckpointError

_MOST = 65536


@dataclass(frozen=True, slots=True)
class Adaption:
    """See `kinds.read_settings` and `kinds.as_lora`."""

    title: str = "adaption prompt"
    rules: KeyRules = rules.ADAPTION_PROMPT

    def settings(self, raw: Mapping[str, Any]) -> LoraConfig:
        counts = {}
        for key in ("adapter_len", "adapter_layers"):
            count = raw.get(key)
            if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= _MOST:
                raise CheckpointError(f"{CONFIG}: {key} must be 1 to {_MOST}, found {count!r:.80}")
            counts[key] = count
        return replace(LoraConfig.of_kind(raw, self.title), adaption=counts)

    def convert(
        self, raw: Mapping[str, Any], settings: LoraConfig, tensors: Tensors, layout: AdapterLayout
    ) -> tuple[LoraConfig, Tensors]:
        return replace(settings, ranks={}), tensors
