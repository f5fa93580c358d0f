"""The text side of a Hugging Face folder: tokenizer, templates, end tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from penstock.errors import CheckpointError
from penstock.text import TextModel, load_text
from tests.text.conftest import CHATML


@pytest.fixture
def folder(tmp_path: Path, smollm2: TextModel) -> Path:
    (tmp_path / "tokenizer.json").write_text(smollm2._tokenizer.to_str())
    write(tmp_path / "config.json", {"vocab_size": 49152, "max_position_embeddings": 2048, "eos_token_id": 0})
    return tmp_path


def write(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value))


def test_same_ids_and_chats_as_transformers(folder: Path) -> None:
    write(
        folder / "tokenizer_config.json",
        {"chat_template": CHATML, "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"},
    )
    ours = load_text(folder)
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    chat = [{"role": "user", "content": "What's 12 + 30?\n\n"}, {"role": "assistant", "content": "42"}]
    assert ours.encode("Hello 123") == reference("Hello 123")["input_ids"]
    expected = reference.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(chat) == expected
    assert ours.decode(expected) == reference.decode(expected, skip_special_tokens=True)
    assert (ours.vocab_size, ours.context_length) == (49152, 2048)


def test_end_tokens_come_from_every_file_that_names_one(folder: Path) -> None:
    assert load_text(folder).eos_token_ids == (0,)
    write(folder / "generation_config.json", {"eos_token_id": [4, 0]})
    write(folder / "tokenizer_config.json", {"eos_token": {"content": "<|im_end|>"}})
    assert load_text(folder).eos_token_ids == (4, 0, 2)


def test_sampling_values_come_from_generation_config(folder: Path) -> None:
    assert load_text(folder).sampling.given == {}
    write(folder / "generation_config.json", {"do_sample": True, "temperature": 0.6, "top_k": 20})
    assert load_text(folder).sampling.given == {"temperature": 0.6, "top_k": 20}


def test_the_turn_end_counts_even_if_no_file_names_it(folder: Path) -> None:
    write(folder / "tokenizer_config.json", {"chat_template": CHATML})
    assert load_text(folder).eos_token_ids == (0, 2)


def test_where_templates_are_found(folder: Path) -> None:
    chat = [{"role": "user", "content": "x"}]
    assert not load_text(folder).has_chat_template
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "T"}]
    write(folder / "tokenizer_config.json", {"chat_template": named})
    assert load_text(folder).render_chat(chat) == "A"
    assert load_text(folder).render_chat(chat, tools=[{"type": "function"}]) == "T"
    write(folder / "chat_template.json", {"chat_template": "B"})
    assert load_text(folder).render_chat(chat) == "B"
    (folder / "chat_template.jinja").write_text("C{{ bos_token }}")
    assert load_text(folder).render_chat(chat) == "C"


def test_missing_and_damaged_files_are_named(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json cannot be read"):
        load_text(folder)
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer.json").write_text('{"model": 7}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        load_text(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        load_text(folder)
    (folder / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"convert its tokenizer\.model"):
        load_text(folder)
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        load_text(tmp_path / "nowhere")
