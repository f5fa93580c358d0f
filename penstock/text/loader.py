"""Loads a `TextModel` (tokenizer, chat template, end tokens) from a Hugging Face folder or a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from penstock.engine.loading.gguf import GGUFFile, gguf_in
from penstock.engine.loading.gguf_config import config_from_gguf
from penstock.engine.models.wrappers import decoder_keys
from penstock.errors import CheckpointError
from penstock.text.chat_template import ChatTemplate
from penstock.text.gguf_tokenizer import CONTROL, tokenizer_from_gguf
from penstock.text.own_templates import OWN_TEMPLATES
from penstock.text.sampling_defaults import from_generation_config, from_gguf_metadata
from penstock.text.text_model import TextModel

END_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|endoftext|>",
    "<eos>",
    "</s>",
)
"""End tokens of the supported model families. GGUF metadata names only one or two of a model's
end tokens, so those with these spellings count as well."""


def load_text(path: str | Path) -> TextModel:
    """The tokenizer and chat template of the checkpoint at `path`."""
    path = Path(path)
    gguf = gguf_in(path)
    if gguf is not None:
        return _from_gguf(GGUFFile(gguf))
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a checkpoint: give a .gguf file or a folder with config.json")
    return _from_folder(path)


def _from_gguf(file: GGUFFile) -> TextModel:
    metadata = file.metadata
    config = config_from_gguf(file)
    tokenizer = tokenizer_from_gguf(file)
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type")

    def spelling(name: str) -> str:
        token = metadata.get(f"tokenizer.ggml.{name}")
        return tokens[token] if isinstance(token, int) and 0 <= token < len(tokens) else ""

    ends = _ids(config.get("eos_token_id"))
    for name in END_TOKENS:
        if name == "<|end|>" and tokenizer.token_to_id("<|flush|>") is not None:
            continue  # Solar Open: it ends each message, a thought too
        token = tokenizer.token_to_id(name)
        if token is not None and types is not None and types[token] == CONTROL and token not in ends:
            ends.append(token)
    template = None
    if metadata.get("tokenizer.chat_template"):
        prefix = "tokenizer.chat_template."
        named = {key.removeprefix(prefix): metadata[key] for key in metadata if key.startswith(prefix)}
        if not all(isinstance(text, str) for text in (*named.values(), metadata["tokenizer.chat_template"])):
            raise CheckpointError(f"{file.path}: a chat template is not text; the file is damaged")
        template = ChatTemplate(
            {**named, "default": metadata["tokenizer.chat_template"]},
            {"bos_token": spelling("bos_token_id"), "eos_token": spelling("eos_token_id")},
        )
    sampling = from_gguf_metadata(metadata, str(file.path))
    beside = file.path.parent / "generation_config.json"
    if beside.exists():
        sampling = sampling.over(from_generation_config(_json(beside), str(beside)))
    return TextModel(
        tokenizer,
        template=template,
        eos_token_ids=ends,
        vocab_size=config["vocab_size"],
        context_length=config["max_position_embeddings"],
        sampling=sampling,
    )


def _from_folder(folder: Path) -> TextModel:
    config = _json(folder / "config.json")
    config = {**config, **decoder_keys(config)}
    settings = _json(folder / "tokenizer_config.json")
    tokenizer = read_tokenizer(folder)
    special = special_tokens(folder)
    ends: list[int] = []
    generation = _json(folder / "generation_config.json")
    for source in (generation, config):
        ends += [token for token in _ids(source.get("eos_token_id")) if token not in ends]
    eos = tokenizer.token_to_id(special["eos_token"]) if special["eos_token"] else None
    if eos is not None and eos not in ends:
        ends.append(eos)
    templates = _templates(folder, settings) or _built_in(config)
    return TextModel(
        tokenizer,
        template=ChatTemplate(templates, special) if templates else None,
        eos_token_ids=ends,
        vocab_size=config.get("vocab_size"),
        context_length=config.get("max_position_embeddings"),
        sampling=from_generation_config(generation, str(folder / "generation_config.json")),
    )


def special_tokens(folder: Path) -> dict[str, str]:
    """How the special tokens that templates ask for are spelled; empty where there is none."""
    settings = _json(folder / "tokenizer_config.json")
    return {name: _content(settings.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}


def own_templates(folder: Path) -> dict[str, str]:
    """The chat templates in a folder, by name."""
    return _templates(folder, _json(folder / "tokenizer_config.json"))


def read_tokenizer(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.exists():
        found = next((name for name in ("tekken.json", "tokenizer.model") if (folder / name).exists()), None)
        hint = "" if found is None else f"; convert its {found} to tokenizer.json first"
        if found == "tekken.json":
            hint += " (transformers does it: MistralConverter), or take tokenizer.json from another copy of the model"
        raise CheckpointError(f"{folder} has no tokenizer.json{hint}")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for a file it cannot read
        raise CheckpointError(f"{file} cannot be read ({error!s:.300}); download it again") from error


def _templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name. A separate file takes precedence over the tokenizer's settings."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return {"default": file.read_text(encoding="utf-8")}
    for found in (_json(folder / "chat_template.json").get("chat_template"), settings.get("chat_template")):
        if isinstance(found, str):
            return {"default": found}
        if isinstance(found, list):
            return {str(entry["name"]): str(entry["template"]) for entry in found}
    return {}


def _built_in(config: dict[str, Any]) -> dict[str, str]:
    """The template for models whose makers publish none."""
    template = OWN_TEMPLATES.get(str(config.get("model_type")))
    return {} if template is None else {"default": template}


def _content(token: Any) -> str:
    """A special token's spelling; files write it as a string or as an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _ids(value: Any) -> list[int]:
    if isinstance(value, int):
        return [value]
    return [int(token) for token in value] if isinstance(value, Iterable) else []


def _json(file: Path) -> dict[str, Any]:
    """A JSON object; empty when the file does not exist."""
    if not file.exists():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} does not hold a JSON object")
    return value
