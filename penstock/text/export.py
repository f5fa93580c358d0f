"""Writes tokenizer files beside new weights: copied from a folder, or generated from a GGUF file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from penstock.engine.loading.gguf import GGUFFile, gguf_in
from penstock.text.gguf_tokenizer import tokenizer_from_gguf
from penstock.text.loader import load_text

_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def write_text_files(source: Path, folder: Path) -> None:
    """Tokenizer, chat template and end tokens of the checkpoint at `source`, in the layout of a Hugging Face folder."""
    gguf = gguf_in(source)
    if gguf is None:
        for name in _COPIED:
            if (source / name).exists():
                shutil.copy(source / name, folder / name)
        return
    file = GGUFFile(gguf)
    tokenizer_from_gguf(file).save(str(folder / "tokenizer.json"))
    tokens: list[str] = file.metadata["tokenizer.ggml.tokens"]
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        token = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None and token < len(tokens):
            settings[name] = tokens[token]
    if template := file.metadata.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    ends = list(load_text(gguf).eos_token_ids)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}, indent=2))
