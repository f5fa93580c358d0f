"""Grammars in the notations of other servers: GBNF and structural tags. What they allow is allowed, the rest is not."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from penstock.engine.grammar.interface import GrammarError
from penstock.text import grammars
from penstock.text.gbnf import gbnf_to_lark, is_gbnf
from penstock.text.grammars import Grammar
from penstock.text.structural_tags import structural_tag
from tests.engine.grammar.tokens import VOCAB, compiler, encode, walk

COMPILER = compiler(VOCAB)
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws   # a comment
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
# Optional space
ws ::= | " " | "\n" [ \t]{0,20}
"""
SUMS = r"""root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
CODE = r"""root ::= declaration*
declaration ::= type-name identifier "(" ")" "{" statement* "}"
type-name ::= "int" ws | "char" ws
identifier ::= [a-zA-Z_] [a-zA-Z_0-9]*
statement ::= (type-name identifier ws "=" ws number ";") | (identifier ws "=" ws number ";") |
    ("while" "(" identifier ")" "{" statement* "}")
number ::= [0-9]+
ws ::= ([ \t\n]+)
"""


def accepts(grammar: Grammar, text: str) -> bool:
    matcher = COMPILER.compile(grammars.check(grammar))
    for token in encode(text):
        matcher.accept(token)
        if matcher.error is not None:
            return False
    return matcher.complete or matcher.raw.is_accepting()


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        (JSON, ['{"a": [1, 2.5e1, {"b": null}], "c": "x\\n"}', "{}"], ['{"a": }', "[]", '{"a" 1}']),
        (SUMS, ["(a +b)*c = 12\n", "x=1\n\n\n"], ["a=\n", "a + =1\n", "1=1"]),
        (CODE, ["int main(){int a = 5;into = 5;while(x){whiley = 4;}}", ""], ["int (){}", "int a(){b=4;}"]),
        ('root ::= "yes" | "no"', ["yes", "no"], ["maybe", "ye"]),
        ('root ::= [0-9]{4} "-" [0-9]{2,} x?\nx::="/" .', ["2024-12", "2024-123//"], ["24-12", "2024-1"]),
        ('root ::= ("a" | "ab")+ "bc"', ["abc", "ababbc"], ["ab"]),
        ('root ::= item+\nitem ::= "- " [^\\r\\n\\u2028]+ "\\n"', ["- one\n- two\n"], ["- one", "one\n"]),
        ('root ::= "\\x41\\u00e9\\U0000003F\\t" []-]', ["Aé?\t-", "Aé?\t]"], ["A"]),
        ('root ::= "a"\n  | "b"', ["a", "b"], ["c"]),
    ],
)
def test_gbnf(source: str, good: list[str], bad: list[str]) -> None:
    assert is_gbnf(source)
    grammar = grammars.lark(source.replace("[]-]", "[\\]-]"))
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ('start ::= "a"', "root"),
        ("root ::= missing", "missing"),
        ('root ::= "a', "not closed"),
        ("root ::= [a", "not closed"),
        ('root ::= ("a"', "not closed"),
        ('root ::= "a"\nroot ::= "b"', "two rules"),
        ("root ::= <[1000]>", "tokens"),
        ("root ::= [z-a]", "wrong way"),
        ('root ::= "a"{3,2}', "wrong way"),
        ('root ::= "a"{x}', "count"),
        ("root ::= " + "(" * 100, "deep"),
        ('root ::= "' + "x" * 70_000 + '"', "characters"),
        ('root ::= "a" }', "name"),
    ],
)
def test_what_is_wrong_with_gbnf_is_said(source: str, says: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(says)):
        grammars.check(grammars.lark(source))


def test_a_grammar_without_recursion_is_one_token() -> None:
    assert gbnf_to_lark('root ::= a "x"?\na ::= [a-z]+').startswith("start: N0\n")


INTEGER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
LEGACY = {
    "structures": [
        {"begin": "<f=one>", "schema": INTEGER, "end": "</f>"},
        {"begin": "<f=two>", "schema": {"type": "null"}, "end": "</f>"},
        {"begin": "!go ", "schema": {"enum": ["x", "y"]}, "end": "!"},
    ],
    "triggers": ["<f=", "!"],
}


def content(**node: Any) -> dict[str, Any]:
    return {"format": node}


TAG = {"type": "tag", "begin": "[", "content": {"type": "regex", "pattern": "[0-9]+"}, "end": "]"}


@pytest.mark.parametrize(
    ("described", "good", "bad"),
    [
        (
            LEGACY,
            ["no tags", 'a <f=one>{"n": 3}</f> b <f=two>null</f>', '!go "x"!', ""],
            ["a <f=three>", '<f=one>{"m": 3}</f>', "<f=two>null</g>", '<f=one>{"n": 3}', "wow!"],
        ),
        (
            content(type="triggered_tags", triggers=["["], tags=[TAG], at_least_one=True, stop_after_first=True),
            ["so [12]"],
            ["so", "[12] and", "[x]"],
        ),
        (
            content(type="tags_with_separator", tags=[TAG], separator=", ", at_least_one=True),
            ["[1], [2]", "[1]"],
            ["", "[1][2]"],
        ),
        (
            content(
                type="sequence",
                elements=[
                    {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"},
                    {"type": "or", "elements": [{"type": "const_string", "value": "yes"}, TAG]},
                    {"type": "grammar", "grammar": 'root ::= "."+'},
                ],
            ),
            ["<think>hm {</think>yes.", "<think></think>[3].."],
            ["yes.", "<think>a</think>no.", "<think>a</think>b</think>yes."],
        ),
        (content(type="json_schema", json_schema=INTEGER), ['{"n": 5}'], ["{}"]),
        (content(type="sequence", elements=[TAG, {"type": "any_text"}]), ["[1]", "[1] rest"], ["rest"]),
    ],
)
def test_structural_tags(described: dict[str, Any], good: list[str], bad: list[str]) -> None:
    grammar = structural_tag(described)
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


def test_random_texts_follow_their_tags() -> None:
    fresh = COMPILER.compile(grammars.check(structural_tag(LEGACY)))
    rng = random.Random(3)
    for _ in range(10):
        text = walk(COMPILER, fresh, rng, steps=60) or ""
        for begun in re.findall(r"<f=one>(.*?)</f>", text):
            assert isinstance(json.loads(begun)["n"], int)


@pytest.mark.parametrize(
    ("described", "says"),
    [
        ({}, "structures"),
        ({"structures": [], "triggers": []}, "needs triggers"),
        ({"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["b"]}, "none of the triggers"),
        ({"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["a", "b"]}, "no tag begins"),
        ({"structures": ["x"], "triggers": ["b"]}, "object"),
        (content(type="qwen_xml_parameter"), "no format"),
        (content(type="const_string"), "needs 'value'"),
        (content(type="sequence", elements=[{"type": "any_text"}, TAG]), "come last"),
        (content(type="tag", begin="x", content={"type": "any_text"}, end=5), "end"),
    ],
)
def test_what_is_wrong_with_a_structural_tag_is_said(described: dict[str, Any], says: str) -> None:
    with pytest.raises(GrammarError, match=says):
        structural_tag(described)
