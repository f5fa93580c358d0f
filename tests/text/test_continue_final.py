"""A prompt that ends with the text of the last message: exactly, whatever the template does around it."""

from __future__ import annotations

import pytest

from penstock.text import ChatTemplateError, TextModel
from penstock.text.chat_template import ChatTemplate
from tests.text.conftest import CHATML

ASK = [{"role": "user", "content": "Capital of France?"}]
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
FAMILIES = {
    "chatml": (CHATML, "<|im_start|>user\nCapital of France?<|im_end|>\n<|im_start|>assistant\n"),
    "llama 2, trimmed and padded": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content.strip() }} [/INST]"
        "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
        "<s>[INST] Capital of France? [/INST] ",
    ),
    "llama 3": (
        "{% for m in messages %}{% set c = '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + "
        "m.content | trim + '<|eot_id|>' %}{{ bos_token + c if loop.first else c }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        "<s><|start_header_id|>user<|end_header_id|>\n\nCapital of France?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "gemma": (
        "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
        "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        "<s><start_of_turn>user\nCapital of France?<end_of_turn>\n<start_of_turn>model\n",
    ),
    "phi": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{{ '<|assistant|>\n' if add_generation_prompt else eos_token }}",
        "<|user|>\nCapital of France?<|end|>\n<|assistant|>\n",
    ),
    "qwen 3, with an empty block of thoughts": (
        "{% for m in messages %}{% set content = m.content %}{% if '</think>' in content %}"
        "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>{{ m.role + '\n' }}"
        "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
        "{{ content.lstrip('\n') + '<|im_end|>\n' }}{% endfor %}",
        "<|im_start|>user\nCapital of France?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ),
    "deepseek, which asks whether it is a prefix": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% else %}"
        "<｜Assistant｜>{{ '' if m.prefix else '</think>' }}{{ m.content }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}",
        "<s><｜User｜>Capital of France?<｜Assistant｜>",
    ),
    "harmony": (
        "{% for m in messages %}<|start|>{{ m.role }}{{ '<|channel|>final' if m.role == 'assistant' }}<|message|>"
        "{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}{% endfor %}",
        "<|start|>user<|message|>Capital of France?<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
}
TEXTS = ["The capital is", " The capital is ", "", '\n\n{"capital":\t', "Capital of France?", "日本 é \u200d👩", "1"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_prompt_ends_with_the_text_and_nothing_else(family: str) -> None:
    template, head = FAMILIES[family]
    for text in TEXTS:
        chat = [*ASK, {"role": "assistant", "content": text}]
        assert ChatTemplate(template, VARIABLES).render(chat, continue_final=True) == head + text


def test_thoughts_take_the_place_of_the_empty_block() -> None:
    template, head = FAMILIES["qwen 3, with an empty block of thoughts"]
    chat = [*ASK, {"role": "assistant", "content": "<think>\nParis, or"}]
    rendered = ChatTemplate(template, VARIABLES).render(chat, continue_final=True)
    assert rendered == head.removesuffix("<think>\n\n</think>\n\n") + "<think>\nParis, or"


def test_the_seam_is_tokenized_as_one_text(smollm2: TextModel) -> None:
    head = smollm2.render_chat(ASK)
    for text in ["Par", "The capital is ", "is<|im_end|>it", "x\n", "é"]:
        ids = smollm2.encode_chat([*ASK, {"role": "assistant", "content": text}], continue_final=True)
        assert smollm2.decode(ids, skip_special=False) == head + text
        assert smollm2.encode_chat(ASK) == ids[: len(smollm2.encode_chat(ASK))]
        assert not any(map(smollm2.is_special, ids[len(smollm2.encode_chat(ASK)) :]))
    ids = smollm2.encode_chat([*ASK, {"role": "assistant", "content": "The capital is"}], continue_final=True)
    assert ids == smollm2.encode(head + "The capital is", add_special_tokens=False)


def test_what_cannot_be_continued_is_said() -> None:
    hidden = ChatTemplate("{% for m in messages %}{{ m.role }}{% endfor %}", {})
    with pytest.raises(ChatTemplateError, match="does not show the last message"):
        hidden.render([*ASK, {"role": "assistant", "content": "x"}], continue_final=True)
    calls = [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]
    with pytest.raises(ChatTemplateError, match="tool calls"):
        hidden.render([*ASK, {"role": "assistant", "content": "", "tool_calls": calls}], continue_final=True)
