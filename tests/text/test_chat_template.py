"""Chat templates render as the reference implementation renders them, and fail as the caller's mistake."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.errors import CheckpointError, PenstockError
from penstock.text import ChatTemplateError, TextModel
from penstock.text.chat_template import ChatTemplate, flatten
from tests.text.conftest import CHATML

TOOLS = [{"type": "function", "function": {"name": "wéather", "parameters": {"type": "object", "properties": {}}}}]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <b>\"there\"</b> & 'you'"},
    {"role": "assistant", "content": "Hello\n"},
    {"role": "user", "content": "日本?"},
]

TEMPLATES = {
    "chatml": CHATML,
    "bos and strip": (
        "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content | trim }}"
        " [/INST]{% elif message.role == 'assistant' %} {{ message.content.strip() }}{{ eos_token }}{% endif %}"
        "{% endfor %}"
    ),
    "blocks": """
    {%- if tools %}
        {{- "Tools:\\n" }}
        {%- for tool in tools %}
            {{- tool | tojson }}
            {{- tool.function | tojson(indent=2) }}
        {%- endfor %}
    {%- endif %}
    {% for message in messages %}
        {% if loop.index0 > 2 %}{% break %}{% endif %}
        {% if message.role == "system" %}{% continue %}{% endif %}
    <|{{ message.role }}|>
        {{ message.content }}
    {% endfor %}
    {%- set ns = namespace(count=0) %}
    {%- for message in messages[::-1] %}{% set ns.count = ns.count + 1 %}{% endfor %}
    {{- ns.count }}{{ documents is none }}{{ messages is string }}
    """,
    "gemma, system folded in": (
        "{{ bos_token }}{% set first = '' %}{% if messages[0].role == 'system' %}"
        "{% set first = messages[0].content + '\\n\\n' %}{% set messages = messages[1:] %}{% endif %}"
        "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ first if loop.first }}{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    "phi": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{{ '<|assistant|>\\n' if add_generation_prompt else eos_token }}"
    ),
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("prompt", [True, False])
def test_equals_transformers(name: str, tools: list[dict[str, Any]] | None, prompt: bool) -> None:
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    (expected,), _ = render_jinja_template(
        conversations=[CHAT], chat_template=TEMPLATES[name], tools=tools, add_generation_prompt=prompt, **variables
    )
    template = ChatTemplate(TEMPLATES[name], variables)
    assert template.render(CHAT, tools=tools, add_generation_prompt=prompt) == expected


def test_the_default_models_template(smollm2: TextModel) -> None:
    assert smollm2.has_chat_template
    assert smollm2.render_chat([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_refusal_of_the_template_is_a_chat_template_error() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(ChatTemplateError, match="refuses these messages: roles must alternate"):
        template.render(CHAT)
    assert issubclass(ChatTemplateError, PenstockError)


def test_a_family_without_a_system_role_says_so() -> None:
    body = (
        "{% for m in messages %}"
        "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
    )
    template = ChatTemplate(body, {})
    with pytest.raises(ChatTemplateError, match="System role not supported"):
        template.render(CHAT)
    assert template.render(CHAT[3:]) == "<start_of_turn>user\n日本?<end_of_turn>\n"


@pytest.mark.parametrize("body", ["{{ messages[0]['content'] + 1 }}", "{{ messages[99].content.x }}", "{{ 1 // 0 }}"])
def test_whatever_goes_wrong_in_a_template_is_a_chat_template_error(body: str) -> None:
    with pytest.raises(ChatTemplateError, match="cannot render these messages"):
        ChatTemplate(body, {}).render(CHAT)


@pytest.mark.parametrize(
    "body",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_templates_cannot_leave_the_sandbox(body: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(body, {}).render(CHAT)


def test_a_broken_template_is_the_checkpoints_fault() -> None:
    with pytest.raises(CheckpointError, match="cannot be compiled"):
        ChatTemplate("{% for %}", {})


def test_named_templates() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools"}, {})
    assert template.render(CHAT) == "plain"
    assert template.render(CHAT, tools=TOOLS) == "tools"
    with pytest.raises(CheckpointError, match="none named 'default'"):
        ChatTemplate({"rag": "x"}, {})


def test_extra_variables_reach_the_template_but_do_not_replace_messages() -> None:
    template = ChatTemplate("{{ enable_thinking }} {{ messages | length }}", {})
    assert template.render(CHAT, template_kwargs={"enable_thinking": False, "messages": []}) == "False 4"


def test_the_date_is_todays() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render(CHAT) >= "2024"


def test_content_may_be_text_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert flatten([{"role": "user", "content": parts}])[0]["content"] == "ab"
    assert flatten([{"role": "assistant", "content": None}])[0]["content"] == ""


@pytest.mark.parametrize("content", [[{"type": "image_url", "image_url": {}}], 7, ["text"], {"text": "a"}])
def test_content_that_is_not_text_is_refused(content: Any) -> None:
    with pytest.raises(ChatTemplateError, match=r"messages\[0\]\.content"):
        flatten([{"role": "user", "content": content}])
    with pytest.raises(ChatTemplateError, match=r"messages\[0\]\.role"):
        flatten([{"content": "x"}])


def test_a_model_without_a_template(sentencepiece_tokenizer) -> None:
    model = TextModel(sentencepiece_tokenizer)
    assert not model.has_chat_template
    with pytest.raises(ChatTemplateError, match="no chat template"):
        model.encode_chat(CHAT)
