"""The shape of a model that is named as a user names it: a known name, a folder, a `config.json`, a GGUF file, or a
repository of a hub (`hf:ORG/NAME`), of which only the configuration is fetched."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from penstock.engine.loading.gguf import BLOCK, GGMLType, GGUFFile, gguf_in
from penstock.engine.loading.gguf_config import config_from_gguf
from penstock.errors import CheckpointError, ConfigError, SourceError
from penstock.planning.config_shape import shape_of_config
from penstock.planning.numbers import WeightFormat
from penstock.planning.records import Record, built_in, canonical, entries, find
from penstock.planning.shape import ModelShape

__all__ = ["ModelShape", "known_config", "known_models", "model_shape"]

_OTHER_FORMS = (
    "`penstock plan --models list` shows all; a folder, a config.json, a .gguf file or hf:ORG/NAME will do too"
)


class KnownModel:
    """An entry of `data/models.yaml`."""

    __slots__ = ("active", "aliases", "config", "name", "published", "source")

    def __init__(self, name: str, record: Record) -> None:
        self.name = name
        self.aliases = record.texts("aliases")
        self.source = record.text("source")
        self.published = record.number("published")
        """Billions of parameters, as the model card says."""
        self.active = record.price("active")
        """Of those, how many a token uses; None where the card does not say."""
        self.config: dict[str, Any] = record.inner("config").plain()
        record.done()


@lru_cache(maxsize=1)
def known_models() -> dict[str, KnownModel]:
    """All models with a name, by that name."""
    found = entries(built_in("models.yaml"), "models", ("models",))
    return {name: KnownModel(name, Record(name, node)) for name, node in found.items()}


@lru_cache(maxsize=1)
def _aliases() -> dict[str, str]:
    return {alias: name for name, model in known_models().items() for alias in model.aliases}


def known_config(name: str) -> dict[str, Any]:
    """The dimensions of a known model as the keys of its `config.json`."""
    return dict(known_models()[find(name, known_models(), _aliases(), "model", _OTHER_FORMS)].config)


def with_layers(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The first layers of a model, with what its configuration says of each of them."""
    keys = ("layer_types", "layers_block_type", "hybrid_override_pattern")
    kinds = {key: config[key][:layers] for key in keys if config.get(key)}
    return {**config, **kinds, "num_hidden_layers": layers}


def model_shape(source: str | Path) -> ModelShape:
    """See the module. ConfigError for a name that is not known, with the nearest ones; CheckpointError for a file that
    is not a model's; SourceError for a repository that cannot be read."""
    text = str(source)
    if text.startswith(("hf:", "pypi:")):
        return _of_source(text)
    path = Path(text).expanduser()
    if path.exists():
        return _of_path(path)
    if "/" in text and canonical(text) not in _aliases():
        by_repository = {canonical(model.source.split(" ")[0]): name for name, model in known_models().items()}
        known = by_repository.get(canonical(text))
        if known is None:
            raise ConfigError(f"no model {text!r:.120}: there is no such path; {_OTHER_FORMS}")
        text = known
    name = find(text, known_models(), _aliases(), "model", _OTHER_FORMS)
    return _known_shape(name)


def _of_source(source: str) -> ModelShape:
    """A model in the cache is read there, without the network."""
    from penstock.sources.hub_config import hub_config
    from penstock.sources.resolve import cached

    here = cached(source)
    if here is not None:
        return replace(_of_path(here), name=source.partition(":")[2])
    if source.startswith("hf:"):
        return _named(hub_config(source), source.removeprefix("hf:"))
    raise SourceError(f"{source} is not here yet; fetch it with `penstock pull {source}`")


@lru_cache(maxsize=64)
def _known_shape(name: str) -> ModelShape:
    return shape_of_config(known_models()[name].config, name)


def _of_path(path: Path) -> ModelShape:
    gguf = gguf_in(path)
    if gguf is not None:
        return _of_gguf(GGUFFile(gguf))
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise CheckpointError(f"{path} has no config.json and no .gguf file; give a model's folder or one of those")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error
    return _named(raw, (path.parent if path == file else path).resolve().name)


def _named(raw: Any, name: str) -> ModelShape:
    if not isinstance(raw, dict):
        raise CheckpointError(f"{name}: config.json must hold an object, found {raw!r:.60}")
    return shape_of_config(raw, name)


def _of_gguf(file: GGUFFile) -> ModelShape:
    """Matrices in few bits stay as they are stored; embeddings and norms are widened when they are loaded."""
    shape = shape_of_config(config_from_gguf(file), file.path.stem)
    weights: dict[str, int] = {"layers": 0, "head": 0}
    sizes: dict[str, float] = {"layers": 0.0, "head": 0.0}
    head = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
    for name, tensor in file.tensors.items():
        if len(tensor.shape) < 2 or not (name.startswith("blk.") or name == head) or "ffn_gate_inp" in name:
            continue
        if tensor.type not in BLOCK:
            raise CheckpointError(f"{file.path}: tensor {name!r} is stored as {tensor.type_name}, which is not read")
        count, size = 1, BLOCK[GGMLType(tensor.type)]
        for side in tensor.shape:
            count *= side
        part = "head" if name == head else "layers"
        weights[part] += count
        sizes[part] += count * size[1] / size[0]
    mean = {part: sizes[part] / max(weights[part], 1) for part in weights}
    if mean["layers"] >= 2:
        return shape
    return shape.with_stored(WeightFormat(f"gguf {mean['layers'] * 8:.1f} bits", mean["layers"], mean["head"], "bf16"))
