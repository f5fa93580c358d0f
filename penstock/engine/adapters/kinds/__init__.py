"""The kinds of adapters that PEFT trains, read as what the engine applies: matrices of low rank, vectors, norms, rows,
blocks that inputs are multiplied by, and virtual tokens before prompts.

A kind whose change of the model can be written so is converted when an adapter is loaded, exactly: the rest of the
engine knows LoRA only. Any other kind is refused by name, with what to do instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from penstock.engine.adapters.end_tensors import VIRTUAL
from penstock.engine.adapters.input_tensors import BLOCKS
from penstock.engine.adapters.kinds import rules
from penstock.engine.adapters.kinds.adaption import Adaption
from penstock.engine.adapters.kinds.butterflies import Butterflies
from penstock.engine.adapters.kinds.low_rank import LOW_RANK
from penstock.engine.adapters.kinds.modules import Tensors
from penstock.engine.adapters.kinds.prompts import PROMPTS
from penstock.engine.adapters.kinds.refused import refusal
from penstock.engine.adapters.kinds.renamed import RENAMED
from penstock.engine.adapters.kinds.rotations import Rotations
from penstock.engine.adapters.layout import AdapterLayout
from penstock.engine.adapters.peft_config import LoraConfig
from penstock.engine.adapters.prefixes import PREFIX
from penstock.engine.adapters.spec import CONFIG, WEIGHTS
from penstock.engine.adapters.vector_tensors import ADDED, FACTOR, SCALE
from penstock.engine.loading.keys import KeyRules
from penstock.errors import CheckpointError


class Kind(Protocol):
    """How adapters of a kind are read."""

    @property
    def rules(self) -> KeyRules: ...

    def settings(self, raw: Mapping[str, Any]) -> LoraConfig:
        """What a configuration that follows the rules says."""
        ...

    def convert(
        self, raw: Mapping[str, Any], settings: LoraConfig, tensors: Tensors, layout: AdapterLayout
    ) -> tuple[LoraConfig, Tensors]:
        """See `as_lora`."""
        ...


KINDS: Mapping[str, Kind] = {
    **LOW_RANK,
    **RENAMED,
    **PROMPTS,
    "OFT": Rotations("OFT", rules.OFT),
    "BOFT": Butterflies(),
    "ADAPTION_PROMPT": Adaption(),
}
"""Other than LoRA, by `peft_type`."""
_MADE = tuple(f".{name}" for name in (BLOCKS, FACTOR, ADDED, SCALE, VIRTUAL))
"""Names that tensors have here only once they are converted."""


def read_settings(raw: Mapping[str, Any]) -> LoraConfig:
    """What `adapter_config.json` says, of an adapter of any kind that can be applied; raises for the others."""
    kind = raw.get("peft_type", "LORA")
    if kind == "LORA":
        return LoraConfig.of(raw)
    found = KINDS.get(kind) if isinstance(kind, str) else None
    if found is None:
        raise CheckpointError(f"{CONFIG}: {refusal(kind, ('LORA', *KINDS))}")
    found.rules.check(raw, CONFIG)
    return found.settings(raw)


def as_lora(
    raw: Mapping[str, Any], settings: LoraConfig, tensors: Tensors, layout: AdapterLayout
) -> tuple[LoraConfig, Tensors]:
    """The tensors of a file under the names that LoRA has for them, and the configuration that fits these. `layout`: of
    the whole model."""
    kind = raw.get("peft_type", "LORA")
    for key in tensors.keys():  # noqa: SIM118 - a safetensors handle is not a mapping
        if key.endswith(_MADE) or key == PREFIX:
            raise CheckpointError(f"{WEIGHTS}: cannot apply {key!r}, which no adapter of PEFT has")
    if kind == "LORA":
        return settings, tensors
    return KINDS[kind].convert(raw, settings, tensors, layout)
