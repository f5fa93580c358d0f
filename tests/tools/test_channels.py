"""Answers in the format of gpt-oss: thoughts, text and calls, by control tokens alone."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.engine.grammar.guidance import GuidanceCompiler
from penstock.engine.grammar.interface import words_for
from penstock.text import TextModel, grammars
from penstock.text.vocabulary import vocabulary
from penstock.tools.channels import ChannelSplitter, ChannelTokens, channel_grammar
from penstock.tools.events import gather
from penstock.tools.formats import FORMATS
from penstock.tools.toolbox import Tool, Toolbox
from tests.text.test_thoughts import model

CONTROL = tuple(f"<|{name}|>" for name in ("start", "channel", "message", "call", "return", "constrain"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return model(tmp_path_factory.mktemp("channels"), *CONTROL, special=True)


def read(text: TextModel, said: str, prompt: str = "<|start|>assistant") -> tuple[str, str, list[tuple[str, str]], int]:
    splitter = ChannelSplitter(ChannelTokens(text), {"f", "get_weather"})
    splitter.prepare(text, text.encode(prompt, add_special_tokens=False))
    detokenizer = text.detokenizer()
    thought = answer = ""
    for token in text.encode(said, add_special_tokens=False):
        if token in splitter.marks:
            more = splitter.mark(token, detokenizer.flush())
        else:
            more = splitter.push(detokenizer.push([token]))
        thought, answer = thought + more[0], answer + more[1]
    more = splitter.flush()
    calls = gather(splitter.events).calls
    shown = [(call.name, call.arguments) for call in calls]
    return thought + more[0], answer + more[1], shown, splitter.reasoning_tokens


THINK = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CASES = [
    (f"{THINK}<|channel|>final<|message|>Yes.", "Hm.", "Yes.", []),
    ("<|channel|>final<|message|>Yes.", "", "Yes.", []),
    (
        f"{THINK}<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" '{"a": 1}<|call|>',
        "Hm.",
        "",
        [("get_weather", '{"a": 1}')],
    ),
    (
        f"{THINK} to=functions.f<|channel|>commentary<|message|>" "{}<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.f<|message|>{}",
        "Hm.",
        "",
        [("f", "{}"), ("f", "{}")],
    ),
    (f"{THINK}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
     "Hm.", "I look.\n\nYes.", []),
    (f"{THINK}<|channel|>commentary to=python<|message|>1+1<|call|>", "Hm.\n\n1+1", "", []),
    (f"{THINK}<|channel|>analysis<|message|>More.<|end|><|start|>assistant<|channel|>final<|message|>日本",
     "Hm.\n\nMore.", "日本", []),
    ("<|channel|>analysis<|message|>cut", "cut", "", []),
    ("<|message|>no channel", "", "no channel", []),
    ("plain text", "", "plain text", []),
    ("", "", "", []),
]  # fmt: skip


@pytest.mark.parametrize(("said", "thought", "answer", "calls"), CASES)
def test_messages(text: TextModel, said: str, thought: str, answer: str, calls: list[tuple[str, str]]) -> None:
    assert read(text, said)[:3] == (thought, answer, calls)


def test_the_tokens_of_thoughts_are_those_of_their_messages(text: TextModel) -> None:
    assert read(text, f"{THINK}<|channel|>final<|message|>Yes.")[3] == len("analysis") + len("Hm.") + 3
    assert read(text, "<|channel|>final<|message|>Yes.")[3] == 0


def test_a_prompt_may_have_begun_the_message(text: TextModel) -> None:
    assert read(text, "es.", "<|start|>assistant<|channel|>final<|message|>Y")[:2] == ("", "es.")
    assert read(text, "Hm.<|end|>", "<|start|>assistant<|channel|>analysis<|message|>")[:2] == ("Hm.", "")


def test_which_tokens_end_an_answer(text: TextModel) -> None:
    tokens = ChannelTokens(text)
    ids = tokens.ids
    assert tokens.complete and tokens.stops((ids["end"], 7)) == (7, ids["return"], ids["call"])


INTEGER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOLS = (Tool("f", parameters=INTEGER), Tool("g"))
REQUIRED = Toolbox(TOOLS, FORMATS["hermes"], use="required")
FREE = Toolbox(TOOLS, FORMATS["hermes"], parallel=False)


@pytest.mark.parametrize(
    ("toolbox", "answer", "said", "allowed"),
    [
        (REQUIRED, False, '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 12}', True),
        (REQUIRED, False, '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"b"', False),
        (REQUIRED, False, "<|channel|>final<|message|>hi", False),
        (None, True, '<|channel|>final<|message|>{"a": 1}', True),
        (None, True, "<|channel|>final<|message|>no", False),
        (FREE, False, "<|channel|>final<|message|>any <b> text", True),
        (FREE, False, "<|channel|>commentary to=functions.g <|constrain|>json<|message|>{}", True),
        (FREE, True, '<|channel|>final<|message|>{"a": 1}', True),
        (FREE, True, "<|channel|>final<|message|>text", False),
    ],
)
def test_the_grammar_of_a_message(
    text: TextModel, toolbox: Toolbox | None, answer: bool, said: str, allowed: bool
) -> None:
    compiler = GuidanceCompiler(vocabulary(text), text.vocab_size)
    wanted = grammars.json_schema(INTEGER) if answer else None
    matcher = compiler.compile(channel_grammar(ChannelTokens(text), toolbox, wanted).source)
    mask = np.zeros((1, words_for(text.vocab_size)), np.int32)
    for token in text.encode(said, add_special_tokens=False):
        compiler.fill([matcher], mask)
        if not mask.view(np.uint32)[0, token // 32] >> np.uint32(token % 32) & np.uint32(1):
            assert not allowed, token
            return
        matcher.accept(token)
    assert allowed and matcher.error is None
