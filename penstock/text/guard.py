"""Prevents control-token injection through user text.

A prompt is a template filled with messages, and only the template may contain control tokens. Before rendering,
every control token spelled out in a message is replaced by an unguessable placeholder; after rendering,
every remaining control token must come from the template, and is renamed to an equally
unguessable name; then the placeholders are replaced by the user's text. The tokenizer that encodes the result (see
`TextModel`) knows control tokens only under their secret names. Looking for literal spellings is enough: a spelling
that some normalization would make literal is not a secret name either.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from penstock.errors import CheckpointError
from penstock.text.chat_template import ChatTemplateError

MAX_HIDDEN = 1_000_000
"""Placeholders are numbered with six digits."""
_PIECE = 1 << 16
"""Characters searched by one call of `re`, which holds the interpreter lock."""


class Marked(str):
    """Text of a message that has control tokens of ours: those in the parts that say so."""

    parts: tuple[tuple[str, bool], ...]

    def __new__(cls, *parts: tuple[str, bool]) -> Marked:
        made = super().__new__(cls, "".join(text for text, _ in parts))
        made.parts = parts
        return made


class SpecialTokens:
    """The control tokens of one tokenizer, and their secret names in this process."""

    def __init__(self, spellings: Mapping[str, int]) -> None:
        self.ids = dict(spellings)
        self._nonce = secrets.token_hex(8)
        self.pattern = re.compile(trie_pattern(spellings)) if spellings else None
        self._prefixes = {token[:end] for token in spellings for end in range(1, len(token))}
        self._longest = max(map(len, self._prefixes), default=0)
        self._last = {prefix[-1] for prefix in self._prefixes}

    def secret(self, spelling: str) -> str:
        """The name of a control token in the guarded tokenizer."""
        return f"\ue000{self._nonce}-{self.ids[spelling]}\ue001"

    def rename(self, text: str) -> str:
        """Replaces every control token spelled out in `text` by its secret name."""
        return self.substitute(text, self.secret)

    def occurs_in(self, text: str) -> bool:
        return self.pattern is not None and self.pattern.search(text) is not None

    def substitute(self, text: str, replacement: Callable[[str], str]) -> str:
        """Replaces every control token spelled out in `text`."""
        pattern = self.pattern
        if pattern is None:
            return text
        if len(text) <= _PIECE:
            return pattern.sub(lambda match: replacement(match[0]), text)
        parts: list[str] = []
        at = 0
        while at < len(text):
            until = at + _PIECE
            # One token more than the piece, so that a token which begins in it is seen whole.
            match = pattern.search(text, at, until + self._longest + 1)
            if match is None or match.start() >= until:
                parts.append(text[at:until])
                at = until
            else:
                parts += (text[at : match.start()], replacement(match[0]))
                at = match.end()
        return "".join(parts)

    def unfinished(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a prefix of a control token."""
        if text[-1:] not in self._last:
            return 0
        for length in range(min(self._longest, len(text)), 0, -1):
            if text[-length:] in self._prefixes:
                return length
        return 0


class Guard:
    """One rendering: hides control tokens in user text before it and restores the text after it."""

    def __init__(self, special: SpecialTokens) -> None:
        self._special = special
        self._nonce = ""
        self._hidden: list[str] = []

    def messages(self, messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Copies of messages without control tokens in them."""
        guarded = []
        for index, message in enumerate(messages):
            if self._special.occurs_in(message["role"]):
                raise ChatTemplateError(f"messages[{index}].role must not contain control tokens")
            rest = {key: value for key, value in message.items() if key != "role"}
            guarded.append({"role": message["role"], **self.value(rest)})
        return guarded

    def value(self, value: Any) -> Any:
        """A copy of any JSON-like value without control tokens in it."""
        if value is None:
            return None
        if isinstance(value, Marked):
            return "".join(text if ours else self._hide(text) for text, ours in value.parts)
        if isinstance(value, str):
            return self._hide(value)
        if isinstance(value, Mapping):
            return {
                self._hide(key) if self._special.occurs_in(key) else key: self.value(item)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value

    def restore(self, text: str) -> str:
        """Restores the user's text in rendered text."""
        if not self._hidden:
            return text
        return re.sub(f"{self._nonce}([0-9]{{6}})", self._original, text)

    def _original(self, match: re.Match[str]) -> str:
        index = int(match[1])
        return self._hidden[index] if index < len(self._hidden) else match[0]

    def _hide(self, text: str) -> str:
        if self._special.pattern is None:
            return text
        hidden = self._special.substitute(text, self._stand_in)
        # Two strings that a template concatenates must not form a control token.
        unfinished = self._special.unfinished(hidden)
        if unfinished:
            hidden = hidden[:-unfinished] + self._stand_in(hidden[-unfinished:])
        return hidden

    def _stand_in(self, text: str) -> str:
        if len(self._hidden) >= MAX_HIDDEN:
            raise ChatTemplateError("the messages contain too many spelled-out control tokens")
        if not self._hidden:
            # Digits only: filters that change case, quote, escape or trim leave a placeholder unchanged.
            self._nonce = f"{secrets.randbelow(10**24):024}"
        self._hidden.append(text)
        return f"{self._nonce}{len(self._hidden) - 1:06}"


LONGEST_WORD = 128
"""Characters of a control token: far more than any has, and few enough for a pattern as deep as that."""


def trie_pattern(words: Iterable[str]) -> str:
    """A regular expression that matches the longest of `words`, fast even for thousands of them."""
    root: dict[str, Any] = {}
    for word in words:
        if len(word) > LONGEST_WORD:
            raise CheckpointError(f"a control token has {len(word)} characters; at most {LONGEST_WORD} are supported")
        node = root
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    return _node_pattern(root)


def _node_pattern(node: dict[str, Any]) -> str:
    ends = "" in node
    single = [re.escape(c) for c, child in node.items() if c and list(child) == [""]]
    branches = [re.escape(c) + _node_pattern(child) for c, child in node.items() if c and list(child) != [""]]
    if single:
        branches.append(single[0] if len(single) == 1 else f"[{''.join(single)}]")
    if not branches:
        return ""
    body = branches[0] if len(branches) == 1 and not ends else f"(?:{'|'.join(branches)})"
    return f"{body}?" if ends else body
