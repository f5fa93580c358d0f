"""The cost of grammars: all sides do the same work, and the command prints their ratio."""

from __future__ import annotations

import io
import json
from pathlib import Path

from llguidance import LLMatcher
from rich.console import Console

from penstock.bench import structure
from penstock.engine.config import EngineConfig
from tests.engine.grammar.tokens import compiler
from tests.engine.tiny import write_checkpoint


def test_it_takes_turns_and_prints_the_ratio(tmp_path: Path) -> None:
    folder = write_checkpoint("llama-gqa", tmp_path / "tiny")
    config = EngineConfig(model=str(folder), name="tiny", device="cpu", dtype="float32", threads=1)
    output, file = io.StringIO(), tmp_path / "structure.json"

    def digits(tokens: int) -> str:
        return LLMatcher.grammar_from_regex(f"[0-9]{{{2 * tokens}}}")

    settings = structure.StructureBenchSettings(batch=2, input_len=9, output_len=6, rounds=2)
    structure.main(config, compiler, digits, settings, file, Console(file=output, width=120))
    assert "of free" in output.getvalue() and "its mask alone takes" in output.getvalue()
    results = json.loads(file.read_text())["results"]
    assert set(results["tokens_per_s"]) == {"free", "half", "constrained"}
    assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in results["tokens_per_s"].values())
    assert results["mask_us"] > 0
