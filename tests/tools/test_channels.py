"""Answers in the format of gpt-oss: thoughts, text and calls, by control tokens alone."""

from __future__ import annotations

import pytest

from penstock.text import TextModel
from penstock.tools.channels import ChannelSplitter, ChannelTokens
from penstock.tools.events import gather
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
