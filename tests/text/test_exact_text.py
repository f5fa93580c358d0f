"""Text, to token ids, to text: the same, control tokens included; and the end of a text that is too long."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from penstock.text import TextModel

MARKS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "<0x41>", "<unk>"]
TEXTS = st.lists(
    st.one_of(
        st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Cn"]), max_size=6),
        st.sampled_from([*MARKS, " ", "  ", "\n", " a", "a ", "user", "é", "日本", "👩‍🚀", "▁", "<|im_", "the world"]),
    ),
    max_size=8,
).map("".join)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_decoding_inverts_encoding(smollm2: TextModel, sentencepiece: TextModel, data: st.DataObject) -> None:
    model = data.draw(st.sampled_from([smollm2, sentencepiece]))
    text = data.draw(TEXTS)
    if model is sentencepiece:
        text = text.replace("▁", "_")  # SentencePiece's own sign for a space
        text = text.replace("<0x41>", "").replace("<unk>", "")
    ids = model.encode(text, add_special_tokens=False)
    assert model.decode(ids, skip_special=False) == text
    pieces = model.detokenizer(skip_special=False)
    assert "".join(pieces.push([token]) for token in ids) + pieces.flush() == text


def test_control_tokens_are_shown_as_they_are_spelled(smollm2: TextModel, sentencepiece: TextModel) -> None:
    for model in (smollm2, sentencepiece):
        for text in ("<|im_start|>user", "<|im_start|> user\n<|im_end|> ", " a<|im_end|><|im_end|>b"):
            assert model.decode(model.encode(text, add_special_tokens=False), skip_special=False) == text
    assert sentencepiece.decode(sentencepiece.encode("the <|im_end|>"), skip_special=False) == "<s>the <|im_end|>"
    assert smollm2.decode(smollm2.encode("<|im_start|>user")) == "user"


def test_a_tokenizer_that_puts_one_space_at_the_very_beginning() -> None:
    """As Llama's newer files do: behind control tokens nothing is added, so nothing is taken away."""
    tokenizer = Tokenizer(models.BPE({"▁": 0, "a": 1, "b": 2, "▁a": 3, "<x>": 4}, [("▁", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens([AddedToken("<x>", normalized=False)])
    model = TextModel(tokenizer)
    for text in ("a", "ab<x>ab", "a<x> a", "<x>a"):
        assert model.decode(model.encode(text, add_special_tokens=False), skip_special=False) == text


def test_bytes_that_are_no_text_become_replacement_characters(smollm2: TextModel, sentencepiece: TextModel) -> None:
    fire = sentencepiece.encode("🔥", add_special_tokens=False)
    assert sentencepiece.decode(fire, skip_special=False) == "🔥"
    assert sentencepiece.decode(fire[:-1], skip_special=False) == "�"
    broken = [*fire[:-1], sentencepiece.encode("</s>")[-1]]
    assert sentencepiece.decode(broken, skip_special=False) == "�</s>"
    fire = smollm2.encode("🔥")
    assert smollm2.decode([*fire[:-1], 2], skip_special=False) == "�<|im_end|>"


@pytest.mark.parametrize("kind", ["smollm2", "sentencepiece"])
def test_the_last_tokens_of_a_text(kind: str, request: pytest.FixtureRequest) -> None:
    model: TextModel = request.getfixturevalue(kind)
    text = "the world. Hello, the world! " * 40
    for long in (text, text * 50):
        ids = model.encode(long)
        for last in (1, 2, 7, 100, 1500, 10**6):
            tail = model.encode(long, last=last)
            if last >= len(ids):
                assert tail == ids
            else:
                before = len(ids) - len(model.encode(long, add_special_tokens=False))
                assert tail == [*ids[:before], *ids[-(last - before) :]][:last] if last > before else ids[:last]
                assert len(tail) == last
    chat = [{"role": "user", "content": text * 20}]
    assert model.encode_chat(chat, last=50) == model.encode_chat(chat)[-50:]
