"""Words as the published tokenizers of DeepSeek and Kimi cut them."""

from __future__ import annotations

import pytest

from penstock.text.gguf_tokenizer import PRE_TOKENIZERS

TEXT = "It's 12345 o'clock\n\n  x = f(b)  "
MIXED = "你好 world カタカナ한국어 ПриветΩ K."  # with U+212A, the Kelvin sign


@pytest.mark.parametrize(
    ("name", "words", "mixed"),
    [
        (
            "deepseek-llm",
            ["It", "'", "s", " ", "12345", " o", "'", "clock", "\n", "\n", " ", " x", " =", " f", "(", "b", ")", "  "],
            ["你好", " world", " ", "カタカナ한국어", " ПриветΩ", " K", "."],
        ),
        (
            "deepseek-coder",
            ["It", "'", "s", " ", *"12345", " o", "'", "clock", "\n", "\n", " ", " x", " =", " f", "(", "b", ")", "  "],
            ["你好", " world", " ", "カタカナ한국어", " ПриветΩ", " K", "."],
        ),
        (
            "deepseek-v3",
            ["It", "'s", " ", "123", "45", " o", "'clock", "\n\n", " ", " x", " =", " f", "(b", ")", "  "],
            ["你好", " world", " ", "カタカナ", "한국어", " ПриветΩ", " K", "."],
        ),
        (
            "kimi-k2",
            ["It's", " ", "123", "45", " o", "'clock", "\n\n", " ", " x", " =", " f", "(b", ")", "  "],
            ["你好", " world", " カタカナ한국어", " Привет", "Ω", " K", "."],
        ),
    ],
)  # fmt: skip
def test_words(name: str, words: list[str], mixed: list[str]) -> None:
    cut = PRE_TOKENIZERS[name]()
    for text, wanted in ((TEXT, words), (MIXED, mixed)):
        assert [text[begin:end] for _, (begin, end) in cut.pre_tokenize_str(text)] == wanted
