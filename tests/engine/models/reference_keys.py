"""Writes `penstock/engine/models/reference_keys.py` from the installed transformers.

    python -m tests.engine.models.reference_keys

Run it after an upgrade of transformers: a test compares the file with what is installed. The keys of a class are its
fields, the legacy keys that its constructor takes, and the attributes that its model asks for although the class does
not have them: all that a `config.json` can say to it.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModel, PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters

from penstock.engine.loading.keys import ABSENT
from penstock.engine.models.families import TEXT_TYPES, WRAPPERS
from tests.engine.multimodal import TEXT_TYPES as TINY_TEXT_TYPES
from tests.engine.tiny import COMMON, FAMILIES
from tests.engine.tiny.checkpoints import AutoModelForCausalLM

TARGET = Path(__file__).parents[3] / "penstock/engine/models/reference_keys.py"
TRACED = tuple(sorted({config: name for name, (config, _) in reversed(FAMILIES.items())}.values()))
"""The first checkpoint of each configuration class."""
INTERNAL = (
    "_attn_implementation_internal",
    "_experts_implementation_internal",
    "_heterogeneity_spec",
    "_post_init_done",
)
"""Attributes that classes set for themselves after they have read the keys."""
HEADER = '''"""The keys of the reference's configuration classes, with their defaults: {source}.

Written by `python -m tests.engine.models.reference_keys`; not edited by hand. `ABSENT`: the class has no default for
the key, or its model asks for it although the class does not have it. `SHARED` is what all classes have in common.
"""

from __future__ import annotations

from math import inf
from typing import Any

from penstock.engine.loading.keys import ABSENT
'''


def tables() -> dict[str, Any]:
    """By the names that the file gives them."""
    classes: dict[str, dict[str, Any]] = {}
    for name in TRACED:
        config_name, changes = FAMILIES[name]
        cls = getattr(transformers, config_name)
        classes[cls.model_type] = keys(cls, cls(**{**COMMON, **changes}))
    bert = {key: value for key, value in COMMON.items() if key not in ("num_key_value_heads", "vocab_size")}
    classes["bert"] = keys(transformers.BertConfig, transformers.BertConfig(**bert, vocab_size=50))
    shared = set.intersection(*({(key, repr(value)) for key, value in found.items()} for found in classes.values()))
    names = sorted(key for key, _ in shared)
    for kind in sorted(TEXT_TYPES):
        cls = transformers.CONFIG_MAPPING[kind]
        classes[kind] = keys(cls, cls(**{**COMMON, **TINY_TEXT_TYPES[kind]}))
    own = {name: {key: value for key, value in found.items() if key not in names} for name, found in classes.items()}
    wrappers = {
        kind: {
            key: value
            for key, value in declared(transformers.CONFIG_MAPPING[kind]).items()
            if key not in names or value != classes["llama"][key]
        }
        for kind in sorted(WRAPPERS)
    }
    return {
        "SHARED": {key: classes["llama"][key] for key in names},
        "CLASSES": own | wrappers,
        "ROPE": dict.fromkeys(sorted(RopeParameters.__annotations__), ABSENT),
        "GENERATION": tuple(sorted(transformers.GenerationConfig._get_default_generation_params())),
    }


def keys(cls: type[PreTrainedConfig], config: PreTrainedConfig) -> dict[str, Any]:
    found = declared(cls)
    found |= {key: ABSENT for key in attributes_read(config) if key not in found}
    return dict(sorted(found.items()))


def declared(cls: type[PreTrainedConfig]) -> dict[str, Any]:
    """What can be known without running a model."""
    found = fields(cls)
    found |= {key: ABSENT for key in (*legacy_keys(cls), *cls.attribute_map) if key not in found}
    theta = getattr(cls, "default_theta", None)
    if isinstance(theta, dict):
        found |= {"rope_theta": theta["global"], "rope_local_base_freq": theta["local"]}
    elif found.get("rope_parameters", ABSENT) is not ABSENT:
        found["rope_theta"] = theta
    return found


def fields(cls: type[PreTrainedConfig]) -> dict[str, Any]:
    return {
        field.name: ABSENT if field.default is dataclasses.MISSING else field.default
        for field in sorted(dataclasses.fields(cls), key=lambda field: field.name)
    }


def legacy_keys(cls: type[PreTrainedConfig]) -> Iterable[str]:
    """Keys that are not fields, by the code that takes them out of the constructor's arguments."""
    for base in cls.__mro__:
        for name in ("__post_init__", "convert_rope_params_to_dict", "standardize_rope_params"):
            if name in vars(base):
                source = inspect.getsource(vars(base)[name])
                yield from re.findall(r'kwargs\.(?:pop|get)\(\s*"(\w+)"', source)
                yield from re.findall(r'"(\w+)" in kwargs', source)
                yield from re.findall(r'(?:get|has)attr\(self, "(\w+)"', source)


def attributes_read(config: PreTrainedConfig) -> set[str]:
    """Attributes that building and running the model asks for, except methods and what classes set for themselves."""
    with recorded(PreTrainedConfig) as names, torch.inference_mode():
        auto = AutoModel if isinstance(config, transformers.BertConfig) else AutoModelForCausalLM
        build = text_model(type(config)) if config.model_type in TEXT_TYPES else auto.from_config
        model = build(config, dtype=torch.float32).eval()
        output = model(torch.tensor([[1, 2, 3]]))
        if "past_key_values" in output:
            model(torch.tensor([[4]]), past_key_values=output.past_key_values)
    return {
        name for name in names if not name.startswith("__") and name not in INTERNAL and is_data(type(config), name)
    }


def text_model(config: type[PreTrainedConfig]) -> Any:
    """How the decoder of a wrapper is built, which the library's automatic classes do not know."""
    module = import_module(config.__module__.replace("configuration_", "modeling_"))
    found = [each for name, each in vars(module).items() if name.endswith("TextModel") and each.config_class is config]
    return found[0]._from_config


def is_data(cls: type, name: str) -> bool:
    found = inspect.getattr_static(cls, name, None)
    return found is None or (isinstance(found, property) and found.fset is not None)


@contextmanager
def recorded(cls: type) -> Iterator[set[str]]:
    names: set[str] = set()
    original = cls.__getattribute__

    def record(self: Any, name: str) -> Any:
        names.add(name)
        return original(self, name)

    cls.__getattribute__ = record  # type: ignore[method-assign, assignment]
    try:
        yield names
    finally:
        cls.__getattribute__ = original  # type: ignore[method-assign]


def main() -> None:
    text = HEADER.format(source=f"transformers {transformers.__version__}")
    for name, table in tables().items():
        kind = "tuple[str, ...]" if isinstance(table, tuple) else "dict[str, Any]"
        text += f"\n{name}: {kind} = {table!r}\n".replace(repr(ABSENT), "ABSENT")
    TARGET.write_text(text)
    subprocess.run(["ruff", "format", str(TARGET)], check=True)


if __name__ == "__main__":
    main()
