"""Prompts for models that fill a gap: the text before it and the text behind it, between control tokens.

A model can do it if its vocabulary has the tokens of one of the known formats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """The control tokens of one model's format."""

    prefix: int
    suffix: int
    middle: int | None
    """None: the answer follows the text before the gap, which comes last."""
    ends: tuple[int, ...]
    """Tokens that end the text in the gap, beside the model's own end tokens."""
    repository: int | None = None
    """Before the name of a repository whose files follow; None: the model has no token for that."""
    file: int | None = None
    """Before the name of a file, whose text follows; None: the same."""

    def prompt(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        if self.middle is None:
            return [self.suffix, *after, self.prefix, *before]
        return [self.prefix, *before, self.suffix, *after, self.middle]


_FORMATS: tuple[tuple[str, str, str | None], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma, Granite
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, StableCode, SantaCoder's successors
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),  # Devstral and other newer Mistral files
    ("[PREFIX]", "[SUFFIX]", None),  # Codestral
)
_ENDS = (
    *("<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|file_separator|>", "<|repo_name|>", "<|cursor|>"),
    *("<fim_pad>", "<file_sep>", "▁<EOT>", "<|EOT|>", "<EOT>"),
)


_REPOSITORIES = ("<|repo_name|>", "<repo_name>", "<reponame>")
_FILES = ("<|file_sep|>", "<file_sep>", "<|file_separator|>", "<filename>")


def infill_tokens(token_id: Callable[[str], int | None]) -> InfillTokens | None:
    """The tokens of the format that a vocabulary has; None where it has none."""
    ends = tuple(found for name in _ENDS if (found := token_id(name)) is not None)
    for names in _FORMATS:
        prefix, suffix = token_id(names[0]), token_id(names[1])
        middle = None if names[2] is None else token_id(names[2])
        if prefix is not None and suffix is not None and (names[2] is None or middle is not None):
            repository, file = _first(token_id, _REPOSITORIES), _first(token_id, _FILES)
            return InfillTokens(prefix, suffix, middle, ends, repository, file)
    return None


def _first(token_id: Callable[[str], int | None], names: Sequence[str]) -> int | None:
    return next((found for name in names if (found := token_id(name)) is not None), None)
