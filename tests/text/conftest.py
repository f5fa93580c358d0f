"""Text models for the tests: the real default one, and small ones of other kinds."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from penstock.engine.loading.gguf import GGUFFile
from penstock.text import TextModel, load_text
from penstock.text.chat_template import ChatTemplate
from penstock.text.gguf_tokenizer import tokenizer_from_gguf
from tests.engine.loading.gguf_files import write_gguf

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def smollm2(default_model: Path) -> TextModel:
    return load_text(default_model)


@pytest.fixture(scope="session")
def sentencepiece_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A small SentencePiece vocabulary: bytes, letters, a few words."""
    pieces = ["<unk>", "<s>", "</s>"]
    kinds = [2, 3, 3]
    scores = [0.0, 0.0, 0.0]
    for byte in range(256):
        pieces.append(f"<0x{byte:02X}>")
        kinds.append(6)
        scores.append(0.0)
    letters = [*"▁abcdefghijklmnopqrstuvwxyzHW.,!<>/"]
    words = ["▁t", "he", "▁the", "▁H", "el", "lo", "ello", "▁Hello", "▁w", "or", "ld", "orld", "▁world", "▁▁", "é"]
    for rank, piece in enumerate([*letters, *words]):
        pieces.append(piece)
        kinds.append(1)
        scores.append(-float(rank))
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    path = write_gguf(tmp_path_factory.mktemp("spm") / "spm.gguf", metadata)
    return tokenizer_from_gguf(GGUFFile(path))


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_tokenizer: Tokenizer) -> TextModel:
    sentencepiece_tokenizer.add_special_tokens(
        [AddedToken("<|im_start|>", normalized=False), AddedToken("<|im_end|>", normalized=False)]
    )
    return TextModel(sentencepiece_tokenizer, template=ChatTemplate(CHATML, {"bos_token": "<s>"}), eos_token_ids=[2])
