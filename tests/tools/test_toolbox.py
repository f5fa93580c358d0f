"""Grammars for function calls: what they allow is what the parser reads, in every format."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.engine.grammar.guidance import GuidanceCompiler
from penstock.engine.grammar.interface import words_for
from penstock.text import TextModel, grammars, load_text
from penstock.text.grammars import Grammar
from penstock.text.thought_grammar import behind_thought
from penstock.text.thought_styles import STYLES
from penstock.text.vocabulary import vocabulary
from penstock.tools.events import Parsed, gather
from penstock.tools.formats import FORMATS, FormatName
from penstock.tools.toolbox import Tool, Toolbox, Use

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = (Tool("get_weather", "Weather", CITY, strict=True), Tool("clock"))
MARK = "<repo_name>"
"""A control token of the default model, which stands for an opener that is one."""


@pytest.fixture(scope="module")
def text(default_model: Path) -> TextModel:
    return load_text(default_model)


@pytest.fixture(scope="module")
def compiler(text: TextModel) -> GuidanceCompiler:
    return GuidanceCompiler(vocabulary(text), text.vocab_size)


def toolbox(
    name: FormatName, text: TextModel, *, use: Use = "auto", control: bool = False, **options: object
) -> Toolbox:
    opener_id = text.token_id(MARK) if control else None
    return Toolbox(TOOLS, FORMATS[name], use=use, opener_id=opener_id, **options)  # type: ignore[arg-type]


class Walk:
    """Follows a grammar token by token."""

    def __init__(self, compiler: GuidanceCompiler, text: TextModel, grammar: Grammar) -> None:
        self.compiler, self.text = compiler, text
        self.matcher = compiler.compile(grammars.check(grammar))

    def allowed(self) -> np.ndarray:
        mask = np.zeros((1, words_for(self.text.vocab_size)), np.int32)
        self.compiler.fill([self.matcher], mask)
        assert self.matcher.error is None
        return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))

    def takes(self, words: str) -> bool:
        """Whether the grammar allows a text."""
        for token in self.text.encode(words, special=True, add_special_tokens=False):
            if token not in self.allowed():
                return False
            self.matcher.accept(token)
        return True

    def ramble(self, seed: int, limit: int = 400) -> str:
        """A random text of the grammar."""
        rng = random.Random(seed)
        tokens: list[int] = []
        end = self.text.eos_token_ids[0]
        while not self.matcher.complete and len(tokens) < limit:
            allowed = self.allowed()
            token = end if end in allowed and len(tokens) > 60 else int(rng.choice(allowed))
            self.matcher.accept(token)
            tokens.append(token)
        return self.text.decode(tokens, skip_special=True)


def parsed(box: Toolbox, message: str) -> Parsed:
    parser = box.parser()
    return gather(parser.push(message) + parser.flush())


LIKE_OTHERS = ("deepseek_v4", "hunyuan", "nemotron", "functools", "olmo3", "xlam", "solar_open")
"""Formats whose calls under a grammar differ from others in their marks only."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LIKE_OTHERS else []) for name in FORMATS]
)
@pytest.mark.parametrize("parallel", [False, True])
def test_calls_that_must_be_made_are_always_valid(
    compiler: GuidanceCompiler, text: TextModel, name: FormatName, parallel: bool
) -> None:
    box = toolbox(name, text, use="required", parallel=parallel)
    grammar = box.grammar()
    for seed in range(4):
        message = parsed(box, Walk(compiler, text, grammar).ramble(seed))
        assert message.calls and not message.text
        assert len(message.calls) == 1 or parallel
        for call in message.calls:
            arguments = json.loads(call.arguments)
            if call.name == "get_weather":
                assert set(arguments) <= {"city", "days"} and len(arguments["city"]) <= 6
            else:
                assert (call.name, arguments) == ("clock", {})


def call(name: FormatName, arguments: str, opener: str | None = None) -> str:
    form = FORMATS[name]
    body = f'{{"name": "get_weather", "{form.arguments}": {arguments}}}'
    body = f"[{body}]" if form.listed else body
    return (form.opener if opener is None else opener) + form.before + body + form.after + form.closer


@pytest.mark.parametrize(
    ("name", "control"), [("hermes", False), ("smollm2", False), ("mistral", True), ("hermes", True)]
)
def test_free_text_may_turn_into_a_strict_call(
    compiler: GuidanceCompiler, text: TextModel, name: FormatName, control: bool
) -> None:
    grammar = toolbox(name, text, control=control).grammar()
    opener = MARK if control else None

    def allowed(words: str) -> bool:
        return Walk(compiler, text, grammar).takes(words)

    assert allowed("Just text, with { and [ in it.")
    assert allowed("Let me see. " + call(name, '{"city": "Rome"}', opener))
    assert not allowed("Let me see. " + call(name, '{"city": 3}', opener))
    assert not allowed("Let me see. " + call(name, '{"town": "Rome"}', opener))
    walk = Walk(compiler, text, grammar)
    assert walk.takes("Hello") and text.eos_token_ids[0] in walk.allowed()


def test_bare_calls_are_told_from_text_by_their_first_character(compiler: GuidanceCompiler, text: TextModel) -> None:
    grammar = toolbox("llama3", text, control=True).grammar()

    def allowed(words: str) -> bool:
        return Walk(compiler, text, grammar).takes(words)

    assert allowed("Plain { text }")
    assert allowed(call("llama3", '{"city": "Rome"}', "")) and allowed(call("llama3", '{"city": "Rome"}', MARK))
    assert not allowed('{"nam": 1}') and not allowed(call("llama3", '{"city": 1}', MARK))


@pytest.mark.parametrize("name", ["xlam", "glm4"])
def test_bare_calls_in_other_forms(compiler: GuidanceCompiler, text: TextModel, name: FormatName) -> None:
    grammar = toolbox(name, text).grammar()

    def allowed(words: str) -> bool:
        return Walk(compiler, text, grammar).takes(words)

    good, bad = (
        f"get_weather\n{arguments}" if name == "glm4" else call(name, arguments, "").removesuffix("</tool_call>")
        for arguments in ('{"city": "Rome"}', '{"city": 1}')
    )
    assert allowed(good) and not allowed(bad)
    assert parsed(toolbox(name, text), good).calls
    assert allowed("get_weather is a function; { and [ are brackets.\n{}")


@pytest.mark.parametrize(
    ("name", "opener"), [("phi4", "functools"), ("xlam", None), ("llama3", None), ("pythonic", None), ("glm4", None)]
)
def test_what_the_grammar_does_not_hold_is_no_call(
    compiler: GuidanceCompiler, text: TextModel, name: FormatName, opener: str | None
) -> None:
    """Where a call is held by its beginning alone, or by one opener of several, others are text."""
    box = toolbox(name, text)
    words = "So " + call(name, '{"town": 1}', opener)
    assert Walk(compiler, text, box.grammar()).takes(words)
    assert parsed(box, words) == Parsed(words, [])
    assert parsed(replace(box, tools=(Tool("get_weather"),)), words).calls, "read where nothing is to be held"


@pytest.mark.parametrize("name", ["hermes", "llama3", "glm4", pytest.param("mistral", marks=pytest.mark.slow)])
def test_an_opener_that_is_a_control_token_cannot_be_spelled(
    compiler: GuidanceCompiler, text: TextModel, name: FormatName
) -> None:
    box = toolbox(name, text, control=True)
    box = replace(box, form=replace(box.form, opener=MARK))
    spelled = [text.encode(part, add_special_tokens=False) for part in ("So <repo", "_name", "> x")]
    walk = Walk(compiler, text, box.grammar())
    allowed = []
    for token in [token for part in spelled for token in part]:
        allowed.append(token in walk.allowed())
        walk.matcher.accept(token)
        if not allowed[-1]:
            break
    assert text.token_id(MARK) not in [token for part in spelled for token in part]
    assert len(allowed) > len(spelled[0]) and not allowed[-1]


def test_an_answer_in_a_format_or_a_call(compiler: GuidanceCompiler, text: TextModel) -> None:
    grammar = toolbox("smollm2", text).grammar(grammars.choice(["yes", 'n"o']))

    def allowed(words: str) -> bool:
        return Walk(compiler, text, grammar).takes(words)

    assert allowed("yes") and allowed('n"o') and allowed(call("smollm2", '{"city": "Rome"}'))
    assert not allowed("maybe") and not allowed(call("smollm2", '{"city": 1}'))


def test_an_answer_in_a_format_or_a_call_behind_a_thought(compiler: GuidanceCompiler, text: TextModel) -> None:
    whole = toolbox("smollm2", text).grammar(grammars.choice(["yes"]))
    grammar = behind_thought(whole, STYLES["think"], begun=True)

    def allowed(words: str) -> bool:
        return Walk(compiler, text, grammar).takes(words)

    assert allowed("Hm.</think>\nyes") and allowed("Hm.</think>" + call("smollm2", '{"city": "Rome"}'))
    assert not allowed("Hm.</think>\nmaybe") and not allowed("Hm.</think>" + call("smollm2", '{"city": 1}'))


@pytest.mark.parametrize("use", ["auto", "required"])
@pytest.mark.parametrize(
    ("name", "control"),
    [("smollm2", False), ("hermes", True), ("llama3", False), ("llama3", True), ("mistral", False)],
)
def test_arguments_never_repeat_a_key(
    compiler: GuidanceCompiler, text: TextModel, name: FormatName, control: bool, use: Use
) -> None:
    free = Tool("get_weather", "Weather", {"type": "object", "additionalProperties": {"type": "integer"}}, strict=True)
    opener_id = text.token_id(MARK) if control else None
    grammar = Toolbox((free,), FORMATS[name], use=use, opener_id=opener_id).grammar()
    openers: list[str | None] = [MARK if control else None]
    if FORMATS[name].bare:
        openers = ["", MARK] if control and use == "auto" else [""]
    for opener in openers:
        assert Walk(compiler, text, grammar).takes(call(name, '{"city": 1, "town": 2}', opener))
        assert not Walk(compiler, text, grammar).takes(call(name, '{"city": 1, "city": 2}', opener))
    if use == "auto":
        assert Walk(compiler, text, grammar).takes('See ["a": 1, "a": 2]')
    assert toolbox(name, text, use=use).grammar().json_start is None, "declared keys cannot repeat anyway"


@pytest.mark.parametrize("control", [False, True])
def test_arguments_behind_a_name_never_repeat_a_key(compiler: GuidanceCompiler, text: TextModel, control: bool) -> None:
    free = Tool("get_weather", "Weather", {"type": "object", "additionalProperties": {"type": "integer"}}, strict=True)
    grammar = Toolbox((free,), FORMATS["glm4"], opener_id=text.token_id(MARK) if control else None).grammar()
    assert Walk(compiler, text, grammar).takes('get_weather\n{"city": 1, "town": 2}')
    assert not Walk(compiler, text, grammar).takes('get_weather\n{"city": 1, "city": 2}')


DSML: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "where"},
        "unit": {"enum": ["celsius", "kelvin"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "code": {"type": "string", "pattern": "^[A-Z]{2}$"},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "unit", "place"],
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "integer", "maximum": 9}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
PLACE = '<｜DSML｜parameter name="place" string="false">{"x": 1}</｜DSML｜parameter>\n'


def dsml(*parameters: str, name: str = "go") -> str:
    call = f'<｜DSML｜invoke name="{name}">\n{"".join(parameters)}</｜DSML｜invoke>\n'
    return f"<｜DSML｜function_calls>\n{call}</｜DSML｜function_calls>"


def parameter(name: str, value: str, stated: str = "true") -> str:
    return f'<｜DSML｜parameter name="{name}" string="{stated}">{value}</｜DSML｜parameter>\n'


@pytest.mark.parametrize("control", [pytest.param(False, marks=pytest.mark.slow), True])
def test_arguments_in_dsml_are_tags_that_the_schema_holds(
    compiler: GuidanceCompiler, text: TextModel, control: bool
) -> None:
    """`control`: the mark in all tags is a control token."""
    marks = (("｜DSML｜", text.token_id(MARK)),) if control else ()
    tools = (Tool("go", None, DSML, strict=True), Tool("clock"))
    box = Toolbox(tools, FORMATS["deepseek_v32"], control=marks)  # type: ignore[arg-type]
    required = replace(box, use="required", parallel=False)

    def allowed(words: str, box: Toolbox = box) -> bool:
        words = words.replace("｜DSML｜", MARK) if control else words
        return Walk(compiler, text, box.grammar()).takes(words)

    city, unit = parameter("city", 'Ro"me\n</b> {'), parameter("unit", "kelvin")
    whole = dsml(city, unit, parameter("days", "3", "false"), PLACE)
    assert allowed(f"I look.\n\n{whole}") and allowed(whole, required) and allowed(f"\n\n{whole}", required)
    assert allowed(dsml(city, unit, parameter("code", '"AB"', "false"), PLACE))
    assert allowed(dsml("\n", name="clock"), required)
    for wrong in (
        dsml(unit, PLACE),
        dsml(city, parameter("unit", "rankine"), PLACE),
        dsml(city, unit, parameter("days", "10", "false"), PLACE),
        dsml(city, unit, parameter("code", '"abc"', "false"), PLACE),
        dsml(city, unit, PLACE.replace("1", '"1"')),
        dsml(city, unit, parameter("town", "x"), PLACE),
    ):
        assert not allowed(wrong), wrong
    assert not allowed(dsml("\n", name="other"), required)
    assert allowed("Just text < with { it.") and not allowed("Just text", required)
    read = parsed(box, f"I look.\n\n{whole}")
    assert read.text == "I look."
    assert json.loads(read.calls[0].arguments) == {
        "city": 'Ro"me\n</b> {', "unit": "kelvin", "days": 3, "place": {"x": 1},
    }  # fmt: skip


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "minProperties": 1},
        *(
            pytest.param({"type": "object", "properties": properties}, marks=pytest.mark.slow)
            for properties in (
                {"a>b": {"type": "integer"}},
                {"a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}},
            )
        ),
    ],
)
def test_arguments_without_a_form_in_dsml_are_one_object(
    compiler: GuidanceCompiler, text: TextModel, schema: dict[str, Any]
) -> None:
    name = "a>b" if "a>b" in schema.get("properties", {}) else "a"
    for marks in ((), (("｜DSML｜", text.token_id(MARK)),)):
        tools = (Tool("go", None, schema, strict=True),)
        box = Toolbox(tools, FORMATS["deepseek_v32"], control=marks)  # type: ignore[arg-type]
        good, bad = (dsml(f'{{"{name}": {value}}}\n') for value in (1, '"x"'))
        for words, right in ((f"So: {good}", True), (f"So: {bad}", False)):
            written = words.replace("｜DSML｜", MARK) if marks else words
            assert Walk(compiler, text, box.grammar()).takes(written) is right
        assert json.loads(parsed(box, good).calls[0].arguments) == {name: 1}
