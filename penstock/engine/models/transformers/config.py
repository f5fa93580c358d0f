"""The configuration of a model that no family describes, as the `transformers` library reads it.

Custom code in a checkpoint runs only where the configuration names that checkpoint.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.engine.models.model_config import ModelConfig
from penstock.engine.models.rope import RopeConfig
from penstock.engine.models.wrappers import PLAIN_HEAD, WRAPPERS
from penstock.errors import CheckpointError, needs_extra

log = logging.getLogger(__name__)

_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
_UNBOUNDED = 2048
"""Context of models whose configuration names none, since their positions have no end (ALiBi)."""
_RECURRENT = 1 << 20
"""Of models without attention, which have no positions."""
MANIFEST = "penstock.json"
"""Beside a fetched checkpoint: where it came from (`sources.model_cache`)."""


def installed() -> bool:
    return find_spec("transformers") is not None


def require_library(model_type: str, families: str) -> None:
    """CheckpointError where the extra is not installed."""
    if not installed():
        raise CheckpointError(
            f"model_type {model_type or '(missing)'!r:.80} is not one of ours ({families}); running it through "
            f"transformers {needs_extra('transformers')}"
        )


def read_library_config(raw: Mapping[str, Any], families: str) -> ModelConfig:
    """The shape of a model, from `config.json` as the library understands it. Windows and heads of each layer are found
    when it is loaded."""
    model_type = str(raw.get("model_type", ""))
    require_library(model_type, families)
    config = _config_object(raw, model_type, families)
    if getattr(config, "is_encoder_decoder", False):
        raise CheckpointError(f"a {model_type} model has an encoder and a decoder; only decoders are run")
    text = decoder_config(config)
    layers, hidden = _count(text, "num_hidden_layers"), _count(text, "hidden_size")
    attends = hasattr(text, "num_attention_heads") or not _known(model_type)
    heads = _count(text, "num_attention_heads") if attends else 1
    return ModelConfig(
        family=model_type,
        hidden_size=hidden,
        ffn_size=_optional(text, "intermediate_size") or 4 * hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_optional(text, "num_key_value_heads") or heads,
        head_dim=_optional(text, "head_dim") or hidden // heads,
        vocab_size=_count(text, "vocab_size"),
        max_positions=_positions(text, attends=attends),
        rms_eps=0.0,
        rope=RopeConfig(),
        windows=(None,) * layers,
        tied_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
        attention_scale=1.0,
        by_transformers=True,
    )


def check_custom_code(raw: Mapping[str, Any], folder: Path, allowed: tuple[str, ...]) -> bool:
    """Whether the checkpoint's own code is to run; CheckpointError where it would have to and may not."""
    code = raw.get("auto_map")
    if not code:
        return False
    if not isinstance(code, Mapping):
        raise CheckpointError(f"config.json: auto_map must be an object, found {code!r:.80}")
    names = _names_of(folder)
    if not any(_same(name, names, folder) for name in allowed):
        if _known(str(raw.get("model_type", ""))):
            return False  # the library's own code, as the library itself would choose
        shown = names[-1]
        raise CheckpointError(
            f"{shown} brings its own modelling code, which runs with all rights of this process; to allow it, name it "
            f"in the configuration: trust_remote_code: [{shown}] under its entry in models"
        )
    for target in code.values():
        for reference in target if isinstance(target, list) else [target]:
            if reference is None:
                continue
            module = str(reference).rpartition(".")[0]
            if "--" in str(reference) or not (folder / f"{module}.py").is_file():
                raise CheckpointError(
                    f"config.json: auto_map names {str(reference)!r:.120}, which is not a file of the checkpoint; code "
                    "from elsewhere is not fetched. Put the files beside config.json"
                )
    return True


def _names_of(folder: Path) -> list[str]:
    """What a configuration may call a checkpoint: its folder, and the repository it was fetched from."""
    names = [str(folder.resolve())]
    try:
        source = str(json.loads((folder / MANIFEST).read_bytes())["source"])
    except (OSError, ValueError, KeyError, TypeError):
        return names
    if source.startswith("hf:"):
        names.append(source.removeprefix("hf:").partition(" ")[0].partition("@")[0].partition(":")[0])
    return names


def _same(name: str, names: list[str], folder: Path) -> bool:
    if name.removeprefix("hf:").partition("@")[0] in names:
        return True
    return Path(name).expanduser().resolve() == folder.resolve()


def _known(model_type: str) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    generates = model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or model_type in WRAPPERS
    return model_type in CONFIG_MAPPING and generates


def decoder_config(config: Any) -> Any:
    """The decoder's configuration of a wrapper, with what the wrapper says of its head; of any other model its own."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    wrapper, text = WRAPPERS.get(getattr(config, "model_type", "")), config.get_text_config(decoder=True)
    if wrapper is None or text is config:
        return text
    if text.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise CheckpointError(
            f"a {wrapper.model_type} model around a {text.model_type} decoder is not run: neither we nor transformers "
            "have that decoder alone"
        )
    if wrapper.tied_by != "decoder":
        text.tie_word_embeddings = bool(getattr(config, "tie_word_embeddings", False))
    for key, plain in PLAIN_HEAD.items():
        if wrapper.own_head and hasattr(text, key):
            setattr(text, key, plain)
    return text


def _config_object(raw: Mapping[str, Any], model_type: str, families: str) -> Any:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        if _known(model_type):
            return CONFIG_MAPPING[model_type].from_dict(_decoded(dict(raw)))
        if raw.get("auto_map"):  # its own class is not loaded for this: the keys suffice
            return transformers.PreTrainedConfig.from_dict({k: v for k, v in raw.items() if k != "model_type"})
    except Exception as error:
        raise CheckpointError(f"config.json: transformers cannot read it as a {model_type} model: {error}") from error
    raise CheckpointError(
        f"model_type {model_type or '(missing)'!r:.80} is neither one of ours ({families}) nor a model that generates "
        f"text in the installed transformers {transformers.__version__}"
    )


def _decoded(value: Any) -> Any:
    """Numbers that JSON does not have, which the library writes as objects."""
    if isinstance(value, dict):
        return (
            float(value["__float__"]) if value.keys() == {"__float__"} else {k: _decoded(v) for k, v in value.items()}
        )
    return [_decoded(entry) for entry in value] if isinstance(value, list) else value


_ALIASES = {
    "hidden_size": ("n_embd", "d_model", "dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("n_kv_heads", "num_kv_heads"),
}
"""Names in configurations of custom code; the library's own classes map theirs."""


def _optional(config: Any, key: str) -> int | None:
    for name in (key, *_ALIASES.get(key, ())):
        try:
            value = getattr(config, name, None)
        except RuntimeError:  # it has another value in each layer; what counts is found when the model is loaded
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _count(config: Any, key: str) -> int:
    value = _optional(config, key)
    if value is None:
        raise CheckpointError(
            f"config key {key!r} must be a positive integer, found {getattr(config, key, None)!r:.80}"
        )
    return value


def _positions(config: Any, *, attends: bool) -> int:
    found = next((value for key in _POSITIONS if (value := _optional(config, key)) is not None), None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if isinstance(rope, Mapping) and "longrope" in (rope.get("rope_type"), rope.get("type")):
        # The library chooses between two sets of factors by the longest position in a pass, whatever sequence it is of.
        original = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if isinstance(original, int) and found is not None and original < found:
            log.warning("longrope: contexts end at %d tokens, the length of the original training", original)
            found = original
    if found is None:
        if not attends:
            return _RECURRENT
        log.warning("the configuration names no context length; contexts end at %d tokens", _UNBOUNDED)
        return _UNBOUNDED
    return found
