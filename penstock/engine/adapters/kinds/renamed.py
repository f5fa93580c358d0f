"""Kinds that train vectors, norms or rows of tokens, which adapters of LoRA may have too: under the names of those.

IA3 multiplies outputs of linears, or inputs. Those of the last linear of a gated feed-forward are what its up matrix
gives, times the gate, so multiplying the outputs of the up matrix is the same; other inputs are multiplied as such.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from penstock.engine.adapters.input_tensors import BLOCKS
from penstock.engine.adapters.kinds import rules
from penstock.engine.adapters.kinds.modules import Converted, Module, Tensors, modules_of, site_of
from penstock.engine.adapters.layout import AdapterLayout
from penstock.engine.adapters.peft_config import LoraConfig
from penstock.engine.adapters.spec import CONFIG, WEIGHTS
from penstock.engine.adapters.vector_tensors import ADDED, FACTOR
from penstock.engine.loading.keys import KeyRules
from penstock.errors import CheckpointError

Made = dict[str, Callable[[], Tensor]]


@dataclass(frozen=True, slots=True)
class Renamed:
    """One kind; see `kinds.read_settings` and `kinds.as_lora`."""

    title: str
    rules: KeyRules
    tensor: str
    """The name of a module's tensor."""
    rename: Callable[[list[Module], AdapterLayout], Made]
    whole: bool = False
    """Whether it trains modules as `modules_to_save` does."""

    def settings(self, raw: Mapping[str, Any]) -> LoraConfig:
        settings = LoraConfig.of_kind(raw, self.title)
        if "token_indices" not in raw:
            return settings
        if settings.targets is not None and len(settings.targets) > 1:
            raise CheckpointError(f"{CONFIG}: target_modules must be one module, found {settings.targets!r:.80}")
        name = settings.targets[0] if settings.targets else ""
        return replace(settings, token_rows={name: _tokens(raw["token_indices"])})

    def convert(
        self, raw: Mapping[str, Any], settings: LoraConfig, tensors: Tensors, layout: AdapterLayout
    ) -> tuple[LoraConfig, Tensors]:
        found, others = modules_of(tensors, (self.tensor,), layout)
        modules = list(found)
        if not self.whole and not settings.token_rows:
            check_targets(modules, settings, layout)
        saved = (*settings.saved, *(module.path for module in modules)) if self.whole else settings.saved
        return (
            replace(settings, ranks={}, saved=saved),
            Converted(tensors, others, self.rename(modules, layout)),
        )


def check_targets(modules: Sequence[Module], settings: LoraConfig, layout: AdapterLayout) -> None:
    """Refuse modules that the configuration does not let an adapter change."""
    for module in modules:
        inside = site_of(layout, module.path)
        layer = None if inside is None or layout.sites[inside[0]].end else _layer(module.path)
        if not settings.applies(module.path, "weight", layer):
            raise CheckpointError(
                f"{WEIGHTS} changes {module.path}, which {CONFIG} leaves out (target_modules, exclude_modules or "
                "layers_to_transform)"
            )


def _tokens(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in value):
        raise CheckpointError(f"{CONFIG}: token_indices must be a list of integers, found {value!r:.80}")
    return tuple(value)


def _layer(path: str) -> int | None:
    return next((int(part) for part in path.split(".") if part.isdecimal()), None)


def _scaled(modules: list[Module], layout: AdapterLayout) -> Made:
    """IA3."""
    factors: dict[str, list[Module]] = {}
    made: Made = {}
    for module in modules:
        size = module.size("ia3_l")
        key: str | None = module.key
        if len(size) == 2 and size[0] == 1 != size[1]:
            key = _up_of(module, layout)
        if key is None:
            made[f"{module.key}.{BLOCKS}"] = partial(_as_blocks, module)
        else:
            factors.setdefault(f"{key}.{FACTOR}", []).append(module)
    return made | {key: partial(_product, of) for key, of in factors.items()}


def _as_blocks(module: Module) -> Tensor:
    return module.tensor("ia3_l", 1, None).view(-1, 1, 1)


def _product(modules: list[Module]) -> Tensor:
    product, *others = (module.tensor("ia3_l", *module.size("ia3_l")).flatten() for module in modules)
    for one in others:
        if one.shape != product.shape:
            raise CheckpointError(f"{WEIGHTS}: vectors of {modules[0].path} and {modules[1].path} do not fit together")
        product = product * one
    return product


def _up_of(module: Module, layout: AdapterLayout) -> str | None:
    """The key of the module whose outputs, gated, are the inputs of this one, if there is one."""
    place = site_of(layout, module.path)
    if place is not None:
        index, _ = place
        site, before = layout.sites[index], layout.sites[index - 1] if index else None
        if before is not None and before.gated and site.attribute.endswith("down"):
            own, up = site.modules[0], before.modules[-1]
            if site.experts:  # both are below the same expert
                own, up = own.rpartition(".")[2], up.rpartition(".")[2]
            return f"{module.key.removesuffix(own)}{up}"
    return None


def _added(modules: list[Module], layout: AdapterLayout) -> Made:
    """BEFT."""
    return {
        f"{module.key}.{ADDED}": partial(_flat, module, "beft_bias") for module in modules
    }  # peft keeps it as a row or a column


def _flat(module: Module, name: str) -> Tensor:
    return module.tensor(name, *module.size(name)).flatten()


def _norms(modules: list[Module], layout: AdapterLayout) -> Made:
    return {f"{module.key}.weight": partial(_as_stored, module, "ln_tuning_layers") for module in modules}


def _rows(modules: list[Module], layout: AdapterLayout) -> Made:
    return {
        f"{module.key}.token_adapter.trainable_tokens_delta": partial(_as_stored, module, "trainable_tokens_delta")
        for module in modules
    }


def _as_stored(module: Module, name: str) -> Tensor:
    return module.stored.get_tensor(module.keys[name])


RENAMED: Mapping[str, Renamed] = {
    "IA3": Renamed("IA3", rules.IA3, "ia3_l", _scaled),
    "BEFT": Renamed("BEFT", rules.BEFT, "beft_bias", _added),
    "LN_TUNING": Renamed("LN tuning", rules.LN_TUNING, "ln_tuning_layers", _norms, whole=True),
    "TRAINABLE_TOKENS": Renamed("trainable tokens", rules.TRAINABLE_TOKENS, "trainable_tokens_delta", _rows),
}
"""By `peft_type`."""
