"""Thoughts are told from answers, however the tokens arrive, in every style."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from penstock.text import TextModel, load_text
from penstock.text.byte_tokenizer import write_tokenizer
from penstock.text.thought_splitter import State, ThoughtSplitter, continued_state, prompt_state
from penstock.text.thought_styles import STYLES, StyleName, choose, detect


def model(folder: Path, *added: str, special: bool = False, template: str = "") -> TextModel:
    """The byte tokenizer, with these tokens added."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = write_tokenizer(folder)
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(list(added))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": tokenizer.get_vocab_size()}))
    if template:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return load_text(folder)


def split(text: TextModel, name: StyleName, said: str, state: State) -> tuple[str, str, int]:
    """The thought, the answer, and how many tokens the thought has."""
    splitter = ThoughtSplitter(STYLES[name], text, state)
    detokenizer = text.detokenizer()
    thought = answer = ""
    for token in text.encode(said, add_special_tokens=False):
        if token in splitter.marks and not splitter.answering:
            more = splitter.mark(token, detokenizer.flush())
        else:
            more = splitter.push(detokenizer.push([token]))
        thought, answer = thought + more[0], answer + more[1]
    more = splitter.flush()
    return thought + more[0], answer + more[1], splitter.reasoning_tokens


CASES: list[tuple[StyleName, State, str, str, str]] = [
    ("think", "before", "<think>\nHm, 日本.\n</think>\n\nYes < no.", "Hm, 日本.", "Yes < no."),
    ("think", "before", "\n<think>a</think>b", "a", "b"),
    ("think", "before", "<thin air> is no thought</think>", "", "<thin air> is no thought</think>"),
    ("think", "before", "  Yes.", "", "  Yes."),
    ("think", "before", "<think></think>x", "", "x"),
    ("think", "before", "<think>never ends ", "never ends", ""),
    ("think", "before", "<thi", "", "<thi"),
    ("think", "thinking", "Hm. </thin </think>Yes.", "Hm. </thin", "Yes."),
    ("think", "thinking", "  a\n\nb  \n</think>", "a\n\nb", ""),
    ("think", "answer", "<think>x</think>y", "", "<think>x</think>y"),
    ("deepseek_r1", "thinking", "Hm.</think>\nYes.", "Hm.", "Yes."),
    ("granite", "before", "Here is my thought process: Hm.\n\nHere is my response:\n\nYes.", "Hm.", "Yes."),
    ("granite", "before", "Here's my thought process:Hm.Here's my response:Yes.", "Hm.", "Yes."),
    ("granite", "before", "Here is my answer.", "", "Here is my answer."),
    ("granite33", "before", "<think>Hm.</think>\n<response>Yes, <b>yes</b>.\n</response>\n", "Hm.", "Yes, <b>yes</b>."),
    ("granite33", "before", "<think>Hm.</think>Yes.", "Hm.", "Yes."),
    ("hunyuan", "before", "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>", "Hm.", "Yes."),
    ("hunyuan", "answer", "<answer>\nYes.\n</answer>", "", "Yes."),
    ("hunyuan", "before", "\n<answer> Yes.</answer>\n ", "", "Yes."),
    ("hunyuan", "before", "  <answers> no</answer>", "", "  <answers> no</answer>"),
    ("hunyuan", "before", "<think>a</think>No </answer> here. ", "a", "No </answer> here. "),
    ("hunyuan", "thinking", "a</think><answer>b</answer>\n<tool_calls>[</answer>]", "a", "b<tool_calls>[</answer>]"),
    ("hunyuan", "thinking", "a</think><answer>b </ans", "a", "b </ans"),
    ("hunyuan", "thinking", "a</think> <ans", "a", "<ans"),
    ("mistral", "before", "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes."),
    ("seed_oss", "before", "<seed:think>Hm.</seed:think>Yes.", "Hm.", "Yes."),
    ("gemma4", "before", "<|channel>thought\nHm.\n<channel|>Yes.", "Hm.", "Yes."),
    ("gemma4", "before", "<|channel>thoughtful\n<channel|>Yes.", "thoughtful", "Yes."),
    ("gemma4", "before", "<|channel>thought\n<channel|>Yes.", "", "Yes."),
    ("gemma4", "before", "<|channel>thou", "thou", ""),
    ("gemma4", "thinking", "thought is free.<channel|>Yes.", "thought is free.", "Yes."),
    ("gemma4", "before", "Yes.", "", "Yes."),
    ("kimi", "before", "◁think▷Hm.◁/think▷Yes.", "Hm.", "Yes."),
    (
        "solar_open",
        "before",
        "<|think|>Hm.<|end|><|begin|>assistant<|content|>assistants.<|end|>",
        "Hm.",
        "assistants.",
    ),
    ("solar_open", "before", "<|content|>assistant<|end|>", "", "assistant"),
    ("solar_open", "thinking", "Hm.<|end|><|begin|>assis", "Hm.", "<|begin|>assis"),
    ("solar_open", "thinking", "Hm.<|end|><|begin|>assistant<|tool_calls|>x", "Hm.", "<|tool_calls|>x"),
    ("cohere", "before", "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>", "Hm.", "Yes."),
]


@pytest.mark.parametrize(("name", "state", "said", "thought", "answer"), CASES)
def test_every_style(tmp_path: Path, name: StyleName, state: State, said: str, thought: str, answer: str) -> None:
    marks = (*STYLES[name].begin, *STYLES[name].end)
    for number, text in enumerate(
        (model(tmp_path / "bytes"), model(tmp_path / "whole", *marks), model(tmp_path / "x", *marks, special=True))
    ):
        if number and name == "think" and "</thin" in said:
            continue
        found = split(text, name, said, state)
        assert found[:2] == (thought, answer) or number == 2, (number, found)
        total = len(text.encode(said, add_special_tokens=False))
        assert 0 < found[2] <= total if thought else found[2] in (0, *range(total)), found


def test_the_tokens_of_a_thought_are_those_up_to_the_answer(tmp_path: Path) -> None:
    text = model(tmp_path, "<think>", "</think>")
    assert split(text, "think", "<think>abc</think>de", "before")[2] == 5
    assert split(text, "think", "abc</think>de", "thinking")[2] == 4
    assert split(text, "think", "abc", "before")[2] == 0


def test_half_of_a_mark_at_the_end_is_not_shown(tmp_path: Path) -> None:
    """As where the limit of tokens cuts the end that the engine writes."""
    text = model(tmp_path)
    for length in range(2, len("</think>")):
        said = f"Hm.\n{'</think>'[:length]}"
        assert split(text, "think", said, "thinking") == ("Hm.", "", len(text.encode(said, add_special_tokens=False)))
    assert split(text, "think", "a <", "thinking")[0] == "a <"
    assert split(text, "granite", "Hm. Here", "thinking")[0] == "Hm. Here", "words may be the thought's own"


def test_messages_of_one_answer(tmp_path: Path) -> None:
    marks = ("<|begin|>", "<|think|>", "<|content|>", "<|end|>")
    text = model(tmp_path, *marks, special=True)
    splitter = ThoughtSplitter(STYLES["solar_open"], text)
    said = "<|content|>One.<|end|><|begin|>assistant<|think|> Hm<|end|><|begin|>assistant<|content|>assistant<|end|>"
    detokenizer, shown = text.detokenizer(), ["", ""]
    for token in text.encode(f"{said}<|begin|>assistant", add_special_tokens=False):
        expected = splitter.expects(token)
        parts = splitter.mark(token, "") if expected else splitter.push(detokenizer.push([token]))
        shown = [known + more for known, more in zip(shown, parts, strict=True)]
    assert shown == ["Hm", "One.\n\nassistant"] and splitter.flush() == ("", "")
    assert splitter.reasoning_tokens == len(text.encode("<|think|> Hm<|end|>", add_special_tokens=False))


def test_text_that_spells_a_mark_is_none_where_marks_are_tokens(tmp_path: Path) -> None:
    text = model(tmp_path, "<think>", "</think>")
    splitter = ThoughtSplitter(STYLES["think"], text, "thinking")
    shown = "".join(splitter.push(letter)[0] for letter in "a </think> b")
    assert shown == "a </think> b" and splitter.thinking


def test_any_split_of_the_text_gives_the_same(tmp_path: Path) -> None:
    text = model(tmp_path)
    rng = random.Random(0)
    for name, state, said, thought, answer in CASES:
        if name == "solar_open":
            continue  # its mark is a token here
        for _ in range(10):
            splitter = ThoughtSplitter(STYLES[name], text, state)
            parts, at = ["", ""], 0
            while at < len(said):
                end = min(len(said), at + rng.randrange(1, 9))
                for index, more in enumerate(splitter.push(said[at:end])):
                    parts[index] += more
                at = end
            for index, more in enumerate(splitter.flush()):
                parts[index] += more
            assert parts == [thought, answer]


def test_what_the_prompt_leaves(tmp_path: Path) -> None:
    text = model(tmp_path, "<think>", "</think>")

    def state(prompt: str, name: StyleName = "think") -> State:
        return prompt_state(STYLES[name], text, text.encode(prompt))

    assert state("<|assistant|>") == "before" and state("<|assistant|><think>\n") == "thinking"
    assert state("<|assistant|><think>\n\n</think>\n\n") == "answer"
    assert state("<|user|>what is <think>?<|end|><|assistant|>") == "before"
    assert state("<|assistant|>", "deepseek_r1") == "thinking"
    assert state("<|turn>model\n<|channel>thought\n", "gemma4") == "thinking"
    assert state("<|turn>model\n<|channel>thought\n<channel|>", "gemma4") == "answer"
    assert state("<|turn>model\n", "gemma4") == "before"
    assert continued_state(STYLES["think"], "<think>Hm", "before") == "thinking"
    assert continued_state(STYLES["think"], "<think>Hm</think>Y", "before") == "answer"
    assert continued_state(STYLES["think"], "Y", "before") == "answer"
    assert continued_state(STYLES["think"], "", "thinking") == "thinking"


def test_the_template_tells_the_style() -> None:
    for template, name in (
        ("{{ messages }}", None),
        ("<|system|>{{ x }}<|end|><|assistant|>", None),
        ("... <think>\n", "think"),
        ("content.split('</think>')[-1]", "think"),
        ("[SYSTEM_PROMPT]first [THINK] then [/THINK]", "mistral"),
        ("<seed:think>", "seed_oss"),
        ("◁think▷", "kimi"),
        ("<|START_THINKING|>", "cohere"),
        ("'<|turn>model\\n' '<|channel>thought\\n<channel|>' '<|think|>'", "gemma4"),
        ("after 'Here is my thought process:' write", "granite"),
        ("between <think></think> and <response></response>", "granite33"),
        ("<think></think> and <answer></answer>", "hunyuan"),
        ("'<think>\\n\\n</think>\\n' <|extra_0|>", "hunyuan"),
        ("<｜hy_User｜> <｜hy_Assistant｜><think>", "hunyuan"),
        ("<think></think> <minimax:tool_call> results in <response></response>", "think"),
        ("<|start|>assistant<|channel|>final<|message|>", "gpt_oss"),
        ("<|begin|>assistant<|think|> <|end|> <|begin|>assistant<|content|>", "solar_open"),
    ):
        found = detect(template)
        assert (None if found is None else found.name) == name, template
    assert choose("off", "<think>") is None and choose("auto", "x") is None
    assert choose("deepseek_r1", "x") is STYLES["deepseek_r1"]
