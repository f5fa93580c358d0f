"""Where adapters belong in models that run through `transformers`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engine.adapters.library_modules import cut_of_modules
from penstock.errors import ConfigError


def model_of(*stacks: str) -> Any:
    """A model with two layers in every one of these lists."""
    linears = [
        SimpleNamespace(name=f"{stack}.{layer}.q_proj", layer=layer, module="q_proj", in_features=4, out_features=8)
        for stack in stacks
        for layer in range(2)
    ]
    config = SimpleNamespace(family="odd", num_layers=2)
    return SimpleNamespace(stage=None, cuts=None, embeds=None, config=config, linears=linears)


def test_layers_with_the_same_number_are_not_mistaken_for_each_other() -> None:
    cut = cut_of_modules(model_of("layers"))
    assert [site.attribute for site in cut.whole.sites] == ["q_proj"]
    with pytest.raises(ConfigError, match="several lists of layers"):
        cut_of_modules(model_of("layers", "mtp.layers"))
