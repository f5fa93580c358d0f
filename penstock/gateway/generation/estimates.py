"""Estimates of lengths where no tokenizer is at hand."""

from __future__ import annotations

CHARACTERS_PER_TOKEN = 4
"""The usual average of English text. Where too few tokens would hurt, callers add a margin of their own."""
