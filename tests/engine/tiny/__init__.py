"""Tiny random checkpoints of every family, written by `transformers`, and greedy references from it."""

from __future__ import annotations

from tests.engine.tiny.checkpoints import write_checkpoint
from tests.engine.tiny.common import COMMON
from tests.engine.tiny.families import FAMILIES
from tests.engine.tiny.reference import Reference

__all__ = ["COMMON", "FAMILIES", "Reference", "write_checkpoint"]
