"""A model's vocabulary for the grammar compiler: the bytes of every token, and an encoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from penstock.engine.grammar.interface import GrammarCompiler, GrammarError, GreedyEncoder, Vocabulary
from penstock.text.loader import load_text
from penstock.text.text_model import TextModel


def vocabulary(text: TextModel) -> Vocabulary:
    """The token facts that constrained sampling needs."""
    tokens = [text.token_bytes(token) for token in range(text.vocab_size)]
    special = frozenset(token for token in range(text.vocab_size) if text.is_special(token))
    return Vocabulary(tokens, special, text.eos_token_ids, _Encoder(text, tokens, special))


class _Encoder:
    """Encodes a text to ids with exactly its bytes. Some tokenizers add a space before every text; in that case the
    longest matching token is taken repeatedly instead."""

    def __init__(self, text: TextModel, tokens: list[bytes], special: frozenset[int]) -> None:
        self._text = text
        self._tokens = tokens
        self._greedy = GreedyEncoder(tokens, special)

    def __call__(self, text: str) -> list[int]:
        ids = self._text.encode(text, special=False)
        return ids if b"".join(self._tokens[token] for token in ids) == text.encode() else self._greedy(text)


def grammars_of(checkpoint: str | Path) -> Callable[[int], GrammarCompiler]:
    """A factory of the grammar compiler for `checkpoint`; files are read with the first grammar."""

    def make(vocab_size: int) -> GrammarCompiler:
        try:
            from penstock.engine.grammar.guidance import GuidanceCompiler
            from penstock.engine.grammar.sandbox import SandboxedCompiler
        except ImportError as error:
            raise GrammarError(
                "grammars need the package llguidance, which is not installed on the engine's machine"
            ) from error
        return SandboxedCompiler(
            vocabulary(load_text(checkpoint)), vocab_size, lambda words: GuidanceCompiler(words, vocab_size)
        )

    return make
