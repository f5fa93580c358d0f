"""Tools that take free text: their grammars inside the JSON of a call, and the text read out of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.engine.grammar.guidance import GuidanceCompiler
from penstock.engine.grammar.interface import GrammarError
from penstock.text import TextModel, load_text
from penstock.text.json_quoted import quoted_lark, quoted_regex
from penstock.text.vocabulary import vocabulary
from penstock.tools.free_text import InputReader, arguments, input_grammar, parameters
from tests.tools.test_toolbox import Walk

PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk | update_hunk // one file each
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF
%import common.LF
"""
SCRIPT = r"""
start: pragma_source | plain_source
pragma_source: PRAGMA_LINE NEWLINE SOURCE
plain_source: SOURCE
PRAGMA_LINE: /[ \t]*\/\/ @exec:[^\r\n]*/
NEWLINE: /\r?\n/
SOURCE: /[\s\S]+/
"""


@pytest.fixture(scope="module")
def text(default_model: Path) -> TextModel:
    return load_text(default_model)


@pytest.fixture(scope="module")
def compiler(text: TextModel) -> GuidanceCompiler:
    return GuidanceCompiler(vocabulary(text), text.vocab_size)


def allows(compiler: GuidanceCompiler, text: TextModel, syntax: str, source: str, words: str) -> bool:
    walk = Walk(compiler, text, input_grammar(syntax, source))  # type: ignore[arg-type]
    return walk.takes(arguments(words)) and text.eos_token_ids[0] in walk.allowed()


@pytest.mark.parametrize(
    ("syntax", "source", "good", "bad"),
    [
        (
            "lark",
            PATCH,
            '*** Begin Patch\n*** Update File: a "b".py\n@@ def f():\n-\treturn "\\n"\n+\treturn 1\n*** End Patch\n',
            "*** Begin Patch\nUpdate File: a.py\n*** End Patch\n",
        ),
        ("lark", PATCH, "*** Begin Patch\n*** Add File: é.txt\n+one\n+\n*** End Patch", "*** Begin Patch\n"),
        ("lark", SCRIPT, '// @exec: x\nconst a = "b\\n";\n', ""),
        ("lark", 'start: A ("," A)*\nA: "a".."f" "x"i', "ax,fX", "gx"),
        ("lark", 'start: "\\"" /\\\\+/ WORD\n%import common.WORD', '"\\\\ab', '"ab'),
        ("regex", r'[^"]+"\s\S(?:\d{2}|[a-c\\]+)', 'say"\nx12', 'say"x12'),
        ("regex", r"^(?s:.)[\x41-\x43]$", "\nB", "\nD"),
    ],
)
def test_a_grammar_holds_inside_the_json_of_a_call(
    compiler: GuidanceCompiler, text: TextModel, syntax: str, source: str, good: str, bad: str
) -> None:
    assert allows(compiler, text, syntax, source, good)
    assert not allows(compiler, text, syntax, source, bad)


@pytest.mark.parametrize("pattern", ["(?i)a", r"\bword", "(?=x)", r"\p{L}", "[[:alpha:]]", "a^b", "[b-a]", "[a", "a)"])
def test_what_cannot_be_quoted_exactly_is_refused(pattern: str) -> None:
    with pytest.raises(GrammarError):
        quoted_regex(pattern)


@pytest.mark.parametrize("source", ["start: %json {}", 'start: "\\n"i', "start: X\n%import common.ESCAPED_STRING"])
def test_what_lark_cannot_express_inside_a_string_is_refused(source: str) -> None:
    with pytest.raises(GrammarError):
        quoted_lark(source, "text")


@pytest.mark.parametrize(
    "said", ["", "plain", 'a "quote"\n\ttab \\ slash', "é \U0001f600 end", "\\u0041", "*** Begin Patch\n"]
)
@pytest.mark.parametrize("ascii", [False, True])
def test_text_is_read_the_same_wherever_it_is_split(said: str, ascii: bool) -> None:
    written = json.dumps({"input": said}, ensure_ascii=ascii)
    for size in (1, 2, 3, 5, len(written)):
        reader = InputReader()
        read = "".join(reader.push(written[at : at + size]) for at in range(0, len(written), size)) + reader.finish()
        assert read == reader.text == said


@pytest.mark.parametrize(
    ("written", "read"),
    [('{"patch": "x"}', "x"), ('{"a": 1}', '{"a": 1}'), ("{}", "{}"), ('{"input": "cut', "cut"), ("", "")],
)
def test_arguments_in_another_form_are_not_lost(written: str, read: str) -> None:
    reader = InputReader()
    assert reader.push(written) + reader.finish() == reader.text == read


def test_the_model_is_told_the_grammar() -> None:
    assert PATCH in parameters("lark", PATCH)["properties"]["input"]["description"]
    assert "[a-z]+" in parameters("regex", "[a-z]+")["properties"]["input"]["description"]
