"""A model's vocabulary as a grammar compiler reads it: bytes of every token, and the usual ids of a text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from penstock.engine.grammar.interface import GrammarCompiler, GrammarError, Vocabulary
from penstock.text.loader import load_text
from penstock.text.text_model import TextModel


def vocabulary(text: TextModel) -> Vocabulary:
    """Everything about tokens that constrained sampling needs to know."""
    tokens = [text.token_bytes(token) for token in range(text.vocab_size)]
    special = frozenset(token for token in range(text.vocab_size) if text.is_special(token))
    return Vocabulary(tokens, special, text.eos_token_ids, _Encoder(text, tokens, special))


class _Encoder:
    """Ids whose bytes are exactly a text's. Some tokenizers put a space before every text; where that shows, the
    longest fitting token is taken again and again instead."""

    def __init__(self, text: TextModel, tokens: list[bytes], special: frozenset[int]) -> None:
        self._text = text
        self._tokens = tokens
        self._ids = {name: token for token, name in enumerate(tokens) if name and token not in special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> list[int]:
        wanted = text.encode()
        ids = self._text.encode(text, special=False)
        return ids if b"".join(self._tokens[token] for token in ids) == wanted else self._greedy(wanted)

    def _greedy(self, wanted: bytes) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(wanted):
            for length in range(min(self._longest, len(wanted) - at), 0, -1):
                token = self._ids.get(wanted[at : at + length])
                if token is not None:
                    ids.append(token)
                    at += length
                    break
            else:
                return ids  # a byte that no token stands for: what fits is what there is
        return ids


def grammars_of(checkpoint: str | Path) -> Callable[[int], GrammarCompiler]:
    """What an engine that runs `checkpoint` compiles grammars with; nothing is read before the first of them."""

    def make(vocab_size: int) -> GrammarCompiler:
        try:
            from penstock.engine.grammar.guidance import GuidanceCompiler
        except ImportError as error:
            raise GrammarError("the engine's machine lacks the package llguidance, which grammars need") from error
        return GuidanceCompiler(vocabulary(load_text(checkpoint)), vocab_size)

    return make
