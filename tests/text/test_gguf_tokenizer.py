"""Tokenizers built from GGUF metadata give the ids of the original tokenizers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import GemmaTokenizer, GPT2Tokenizer, Qwen2Tokenizer

from penstock.engine.loading.gguf import GGUFFile
from penstock.errors import CheckpointError
from penstock.sources.resolve import resolve
from penstock.text import TextModel, load_text
from penstock.text.gguf_tokenizer import tokenizer_from_gguf
from tests.engine.loading.gguf_files import write_gguf

DATA = Path(__file__).parent / "data"
SAMPLES = [
    "Hello, world! It's 12345 o'clock, we'LL see.",
    "  spaces   and\n\n\nlines \r\n\t tabs  ",
    "naïve café 日本語 Привет مرحبا 😀👩‍👩‍👧",
    "def f(x):\n        return x**2 + 1_000\n",
    "e\u0301 \u00e9 ½ Ⅷ １２",
]


@pytest.fixture(scope="module")
def corpus(default_model: Path) -> list[str]:
    rows = json.loads((DATA / "smollm2_ids.json").read_text())
    return [row["text"] for row in rows] + SAMPLES


def test_smollm2_ids_are_those_of_llama_cpp(smollm2: TextModel) -> None:
    rows = json.loads((DATA / "smollm2_ids.json").read_text())
    assert len(rows) > 100
    for row in rows:
        ids = smollm2.encode(row["text"], special=row["special"], add_special_tokens=False)
        assert ids == row["ids"], row["text"]


def test_smollm2_splits_digits_one_by_one_and_adds_no_bos(smollm2: TextModel) -> None:
    assert [smollm2.token_text(token) for token in smollm2.encode("in 1984")] == ["in", " ", "1", "9", "8", "4"]


@pytest.mark.slow
def test_gemma_ids_are_those_of_llama_cpp() -> None:
    # One text is left out: `</s>` without special tokens. The file marks it user-defined, so it is always one token
    # here; llama.cpp takes it for a control token by its spelling and cuts it up.
    model = load_text(resolve("gemma3-270m"))
    for row in json.loads((DATA / "gemma3_ids.json").read_text()):
        ids = model.encode(row["text"], special=row["special"], add_special_tokens=False)
        assert ids == row["ids"], row["text"]
    assert model.encode("a")[0] == model.token_id("<bos>")
    assert not model.has_chat_template


@pytest.fixture(scope="module")
def bpe(corpus: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A small byte-level vocabulary with merges that cross no word boundary of any pre-tokenizer."""
    trainer = trainers.BpeTrainer(
        vocab_size=1200, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|endoftext|>"]
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.train_from_iterator(corpus * 3, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def built(path: Path, pre: str, bpe: tuple[dict[str, int], list[tuple[str, str]]], **more: object) -> Tokenizer:
    vocab, merges = bpe
    tokens = sorted(vocab, key=vocab.__getitem__)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token == "<|endoftext|>" else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        **more,
    }
    return tokenizer_from_gguf(GGUFFile(write_gguf(path / f"{pre}.gguf", metadata)))


def test_qwen2_equals_transformers(tmp_path: Path, bpe, corpus: list[str]) -> None:
    reference = Qwen2Tokenizer(vocab=bpe[0], merges=bpe[1])
    ours = built(tmp_path, "qwen2", bpe)
    for text in corpus:
        assert ours.encode(text).ids == reference(text, add_special_tokens=False)["input_ids"], text


def test_gpt2_equals_transformers(tmp_path: Path, bpe, corpus: list[str]) -> None:
    reference = GPT2Tokenizer(vocab=bpe[0], merges=bpe[1])
    ours = built(tmp_path, "gpt-2", bpe)
    for text in corpus:
        assert ours.encode(text).ids == reference(text, add_special_tokens=False)["input_ids"], text


def test_llama3_groups_digits_by_three_and_begins_with_bos(tmp_path: Path, bpe) -> None:
    tokenizer = built(tmp_path, "llama-bpe", bpe)
    words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str("It'S 12345 o'clock!\n\nNext")]
    assert words == ["It", "'S", "Ġ", "123", "45", "Ġo", "'clock", "!ĊĊ", "Next"]
    assert tokenizer.encode("a").ids[0] == 0
    assert built(tmp_path, "llama-bpe", bpe, **{"tokenizer.ggml.add_bos_token": False}).encode("a").ids[0] != 0


def test_sentencepiece_merges_by_score_with_bytes_as_fallback(sentencepiece_tokenizer: Tokenizer) -> None:
    encoding = sentencepiece_tokenizer.encode("Hello the world", add_special_tokens=False)
    assert encoding.tokens == ["▁Hello", "▁the", "▁world"]
    tokens = sentencepiece_tokenizer.encode("a😀", add_special_tokens=False).tokens
    assert tokens == ["▁", "a", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    assert sentencepiece_tokenizer.encode("a").tokens[0] == "<s>"


def test_what_cannot_be_built_exactly_is_refused(tmp_path: Path, bpe) -> None:
    with pytest.raises(CheckpointError, match=r"pre-tokenizer 'martian' is not known; known: .*qwen2"):
        built(tmp_path, "martian", bpe)
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        tokenizer_from_gguf(GGUFFile(write_gguf(tmp_path / "none.gguf", {})))
    with pytest.raises(CheckpointError, match="bos token is 99999"):
        built(tmp_path, "gpt-2", bpe, **{"tokenizer.ggml.bos_token_id": 99999})


SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>", "<|channel>", "<|tool_response>"]


def test_gemma4_equals_transformers(tmp_path: Path, corpus: list[str]) -> None:
    """Merges of the file over the whole text; newlines are merged too, and characters without a token become bytes."""
    trained = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    trained.normalizer = normalizers.Replace(" ", "▁")
    special = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    ascii_only = ["".join(c for c in text if c < "\x7f") for text in corpus] + ["a\n\nb\n\n\nc"] * 3
    trained.train_from_iterator(ascii_only * 2, trainers.BpeTrainer(vocab_size=1500, special_tokens=special))
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    reference = GemmaTokenizer(vocab=model["vocab"], merges=merges)
    reference.add_special_tokens({"additional_special_tokens": SPECIAL[5:]})
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kinds = {**dict.fromkeys(SPECIAL[:7], 3), **dict.fromkeys(SPECIAL[7:], 4), **dict.fromkeys(special[9:], 6)}
    file = write_gguf(
        tmp_path / "m.gguf",
        {
            "tokenizer.ggml.model": "gemma4",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [kinds.get(token, 1) for token in tokens],
            "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
            "tokenizer.ggml.bos_token_id": 2,
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.ggml.unknown_token_id": 3,
            "tokenizer.ggml.add_bos_token": False,
        },
    )
    ours = tokenizer_from_gguf(GGUFFile(file))
    chat = "<|turn>user\n\n\nHello 日<turn|><|channel>thought"
    for text in [*corpus, *SAMPLES, "\n" * 7, " " * 5, chat]:
        ids = reference(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, add_special_tokens=False).ids == ids, text
        assert ours.encode(text).ids == [2, *ids]
        assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert "\n\n" in tokens and len(ours.encode("\n\n", add_special_tokens=False).ids) == 1
