"""Tools that take free text. Models write calls as JSON, so such a tool is a function with the one argument `input`;
here are its description, its grammar, and a reader that takes the text out of the arguments while they arrive."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from penstock.text.grammars import Grammar, literal
from penstock.text.json_quoted import quoted_lark, quoted_regex

Syntax = Literal["text", "lark", "regex"]
ARGUMENT = "input"
_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def parameters(syntax: Syntax, grammar: str) -> dict[str, Any]:
    """The schema of the function. The grammar is part of the description, so that the model knows it."""
    said = "The whole input, as plain text."
    if syntax == "lark":
        said = f"The whole input, as text of this Lark grammar:\n{grammar}"
    elif syntax == "regex":
        said = f"The whole input, as text that matches this regular expression: {grammar}"
    text = {"type": "string", "description": said}
    return {"type": "object", "properties": {ARGUMENT: text}, "required": [ARGUMENT], "additionalProperties": False}


def arguments(text: str) -> str:
    """The arguments of a call with `text`."""
    return json.dumps({ARGUMENT: text}, ensure_ascii=False)


def input_grammar(syntax: Literal["lark", "regex"], source: str) -> Grammar:
    """The grammar of the arguments."""
    head, end = literal(f'{{"{ARGUMENT}": "'), literal('"}')
    body = quoted_lark(source, "input_text") if syntax == "lark" else f"input_text: /{quoted_regex(source)}/"
    return Grammar(({"name": "input", "lark_grammar": f"start: {head} input_text {end}\n{body}"},))


class InputReader:
    """Reads the text out of a call's arguments. What is handed out is final: arguments in another form are handed out
    whole at the end."""

    __slots__ = ("_at", "_ended", "_inside", "_raw", "text")

    def __init__(self) -> None:
        self.text = ""
        self._raw = ""
        self._at = 0
        self._inside = self._ended = False

    def push(self, arguments: str) -> str:
        """The text that `arguments` add."""
        self._raw += arguments
        if self._ended:
            return ""
        if not self._inside:
            head = _HEAD.match(self._raw)
            if head is None:
                return ""
            self._inside, self._at = True, head.end()
        return self._said(self._string())

    def finish(self) -> str:
        """The text that is left when no more arguments follow."""
        return "" if self._inside else self._said(_other_form(self._raw))

    def _said(self, text: str) -> str:
        self.text += text
        return text

    def _string(self) -> str:
        """The part of the string that is complete."""
        raw, found = self._raw, []
        while self._at < len(raw):
            if plain := _PLAIN.match(raw, self._at):
                found.append(plain[0])
                self._at = plain.end()
            elif raw[self._at] == '"':
                self._ended = True
                break
            elif (escape := self._escape()) is None:
                break
            else:
                found.append(escape)
        return "".join(found)

    def _escape(self) -> str | None:
        """One escape sequence, or a pair that makes one character; None where it is not complete."""
        raw, at = self._raw, self._at
        kind = raw[at + 1 : at + 2]
        if kind != "u":
            if not kind:
                return None
            self._at = at + 2
            return _ESCAPES.get(kind, kind)
        code = _code(raw, at)
        if code is None:
            return None
        if 0xD800 <= code <= 0xDBFF:
            following = raw[at + 6 : at + 8]
            if "\\u".startswith(following) and (second := _code(raw, at + 6)) is None:
                return None
            if following == "\\u" and second is not None and 0xDC00 <= second <= 0xDFFF:
                self._at = at + 12
                return chr(0x10000 + ((code - 0xD800) << 10) + (second - 0xDC00))
        self._at = at + 6
        return "\ufffd" if 0xD800 <= code <= 0xDFFF else chr(code)


def _code(raw: str, at: int) -> int | None:
    """The number of an escape `\\uXXXX`; None where it is not complete. Letters that are no digits count as unknown."""
    digits = raw[at + 2 : at + 6]
    if len(digits) < 4:
        return None
    try:
        return int(digits, 16)
    except ValueError:
        return 0xFFFD


def _other_form(raw: str) -> str:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return raw
    if isinstance(value, dict) and len(value) == 1:
        (value,) = value.values()
    return value if isinstance(value, str) else raw
