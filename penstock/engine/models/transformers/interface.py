"""The engine's attention functions, made known to the `transformers` library and chosen for a model."""

from __future__ import annotations

from typing import Any

from torch import nn

from penstock.engine.models.transformers.attention import CALLS, PAGED, SURVEYED, attention_function
from penstock.engine.models.transformers.survey import Survey


def register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(PAGED, attention_function)
    AttentionInterface.register(SURVEYED, attention_function)
    AttentionMaskInterface.register(SURVEYED, _surveyed_mask)


def use(base: nn.Module, implementation: str) -> None:
    """Choose the attention function of a model and of the models in it."""
    for module in base.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            config._attn_implementation_internal = implementation


def _surveyed_mask(*arguments: Any, **options: Any) -> Any:
    calls = CALLS.get()
    assert isinstance(calls, Survey)
    return calls.mask(*arguments, **options)
